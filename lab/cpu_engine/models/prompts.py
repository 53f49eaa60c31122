"""Cuts held-out prompts for the shipped models from a small file of token ids and nothing else.

Every token comes from documents no training step saw, so acceptance measured on these prompts is
acceptance on unseen text.  Made by :mod:`lab.cpu_engine.models.make`; read with numpy alone.
"""

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

DOMAINS: Final = ("code", "prose", "json", "csv")
LONGEST_PROMPT: Final = 1024
"""Tokens; half of what the models can hold, so that there is room to generate."""

PASSAGES: Final = 18
"""Separate stretches of ``LONGEST_PROMPT`` held-out tokens a domain; together 36 KB."""

FOLDER: Final = Path(__file__).parent / "held_out"


def held_out_prompts(domain: str, count: int, length_tokens: int, seed: int) -> list[list[int]]:
    """Cuts ``count`` prompts of ``length_tokens`` token ids each, the same for the same arguments.

    No two prompts of one call start at the same token, so that a prefix cache cannot answer for the
    model.

    Raises:
        ValueError: the domain is unknown, or there are not that many prompts of that length.
    """
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}: choose one of {', '.join(DOMAINS)}")
    if not 1 <= length_tokens <= LONGEST_PROMPT:
        raise ValueError(f"a prompt has 1 to {LONGEST_PROMPT} tokens, not {length_tokens}")
    passages = _passages(domain)
    starts = LONGEST_PROMPT - length_tokens + 1
    if not 0 <= count <= PASSAGES * starts:
        raise ValueError(
            f"{domain} has {PASSAGES * starts} prompts of {length_tokens} tokens, not {count}: "
            "ask for shorter ones"
        )
    rng = np.random.default_rng([seed, DOMAINS.index(domain)])
    picks = rng.choice(PASSAGES * starts, size=count, replace=False)
    return [
        passages[passage, start : start + length_tokens].tolist()
        for passage, start in zip(*np.divmod(picks, starts), strict=True)
    ]


def passage_file(folder: Path, domain: str) -> Path:
    """Names the file of the passages of ``domain``: uint16, [PASSAGES, LONGEST_PROMPT]."""
    return folder / f"{domain}.npy"


@cache
def _passages(domain: str) -> npt.NDArray[np.uint16]:
    passages: npt.NDArray[np.uint16] = np.load(passage_file(FOLDER, domain))
    return passages
