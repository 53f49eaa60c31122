"""The classes of requests, each with the acceptance that was measured on a pair of models.

The public traces and this repository's own small models give the numbers again:

    python -m lab.paced.curves sdb_instructcoder_half.jsonl sdb_gsm8k.jsonl sdb_sharegpt.jsonl
    python -m lab.paced.curves --own

The curves "all" of the drafter "eagle" are those of code, math and chat, in this order; "least" of
sdb_sharegpt is that of hard; and "on csv" is that of unseen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator import published
from simulator.curves import conditional
from simulator.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Describes one kind of requests.

    survival: P(the first k drafts of a step are all accepted), k = 1, 2, ...
    """

    name: str
    survival: tuple[float, ...]
    source: str


_TRACE = "Llama-3.1-8B with EAGLE (arXiv 2601.11580), replayed with 8 drafts a step: "
CLASSES: Mapping[str, TrafficClass] = {
    found.name: found
    for found in (
        TrafficClass(
            "code",
            (0.647, 0.396, 0.260, 0.192, 0.146, 0.115, 0.092, 0.063),
            _TRACE + "InstructCoder",
        ),
        TrafficClass(
            "math", (0.663, 0.427, 0.269, 0.175, 0.108, 0.070, 0.046, 0.026), _TRACE + "GSM8K"
        ),
        TrafficClass(
            "chat", (0.595, 0.347, 0.221, 0.151, 0.110, 0.082, 0.062, 0.042), _TRACE + "ShareGPT"
        ),
        TrafficClass(
            "hard",
            (0.447, 0.137, 0.060, 0.036, 0.026, 0.020, 0.016, 0.012),
            _TRACE + "the tenth of the ShareGPT requests that accepts least",
        ),
        TrafficClass(
            "unseen",
            (0.120, 0.016),
            "this repository's code-only EAGLE3 drafter on CSV, measured with 8 drafts a step",
        ),
    )
}


def own_curves() -> dict[str, dict[str, Sequence[float]]]:
    """Class -> the engine's own drafter -> conditional acceptance a_1, a_2, ..."""
    return {name: {"eagle3": conditional(found.survival)} for name, found in CLASSES.items()}


def published_curves(table: str) -> dict[str, dict[str, Sequence[float]]]:
    """Returns the curves that were published with a table, as one class "published".

    The serial drafter plays the engine's own, the block drafter the second one.  Raises
    InvalidInputError for a table without published curves.
    """
    curves = published.acceptance_curves(table)
    if not curves:
        raise InvalidInputError(table, 0, "no acceptance was published with it")
    names = {"mtp": "eagle3", "dflash": "dflash"}
    return {"published": {names[name]: conditional(curve) for name, curve in curves.items()}}
