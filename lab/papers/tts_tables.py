"""The tables of "Test-Time Speculation" (arXiv:2605.09329), which `tts_tables.json` holds.

Table 3: DFlash on Qwen3.5-122B, acceptance length and tokens/s (stride 0 is plain DFlash).  Table
7: DFlash on Qwen3-8B, acceptance length.  Table 8: acceptance length and speed on one benchmark of
Table 7, relative to a stride of 1.
"""

from pathlib import Path
from typing import Final

from pydantic import TypeAdapter
from typing_extensions import TypedDict

# By stride.
Lengths = dict[int, float]
LengthsAndSpeeds = dict[int, tuple[float, float]]


class _Tables(TypedDict):
    TABLE_3: dict[str, LengthsAndSpeeds]
    TABLE_7: dict[str, Lengths]
    TABLE_8: LengthsAndSpeeds


_TABLES = TypeAdapter(_Tables).validate_json(Path(__file__).with_suffix(".json").read_bytes())
TABLE_3: Final = _TABLES["TABLE_3"]
TABLE_7: Final = _TABLES["TABLE_7"]
TABLE_8: Final = _TABLES["TABLE_8"]
