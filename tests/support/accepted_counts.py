"""How many drafts each sequence of a step accepts, drawn."""

from collections.abc import Sequence
from typing import Protocol


class Dice(Protocol):
    """A generator of random numbers, Python's or numpy's."""

    def random(self) -> float: ...


def accepted_counts(
    dice: Dice, sequences: int, gamma: int, acceptance: float | Sequence[float]
) -> list[int]:
    """How many of the sequences accepted exactly 0, 1, .. gamma drafts.

    acceptance: of a draft whose predecessors were accepted; alike at every position, or for each.
    """
    chances = [acceptance] * gamma if isinstance(acceptance, int | float) else acceptance
    counts = [0] * (gamma + 1)
    for _ in range(sequences):
        accepted = 0
        while accepted < gamma and dice.random() < chances[accepted]:
            accepted += 1
        counts[accepted] += 1
    return counts
