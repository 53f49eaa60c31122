"""Acceptance estimates that outlive a session: what a fresh one begins from.

A belief is what one engine knew of one drafter (and one request class).  Beliefs of several engines
are pooled position by position, weighted by their exposures; every one counts half as much after
`HALF_LIFE_SECONDS`, and all of them together never more than `WARM_EXPOSURES`: enough to begin in
the right place, little enough that the live traffic soon speaks louder.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from controller.core.errors import MALFORMED, InvalidBeliefError
from controller.core.types import MAX_GAMMA, MAX_LABEL_CHARACTERS

HALF_LIFE_SECONDS = 6 * 3600.0
WARM_EXPOSURES = 64.0
# A class or position with less behind it is not worth telling.
_LEAST_EXPOSURES = 1.0


@dataclass(frozen=True, slots=True)
class Belief:
    """Of one drafter; label: the request class, "" for all traffic.

    conditional, exposures: a_k and the sequences behind it, k = 1..gamma_max.
    Raises InvalidBeliefError for numbers that cannot be.
    """

    drafter: str
    label: str
    conditional: tuple[float, ...]
    exposures: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.conditional) != len(self.exposures) or len(self.conditional) > MAX_GAMMA:
            raise InvalidBeliefError(
                f"{len(self.conditional)} means and {len(self.exposures)} exposures are no curve"
            )
        if len(self.label) > MAX_LABEL_CHARACTERS:
            raise InvalidBeliefError("the label is too long")
        if not all(0 <= a <= 1 for a in self.conditional):
            raise InvalidBeliefError(f"means {self.conditional} are no probabilities")
        if not all(0 <= n < math.inf for n in self.exposures):
            raise InvalidBeliefError(f"exposures {self.exposures} are no counts")


def to_json(beliefs: Sequence[Belief]) -> str:
    """For a store."""
    return json.dumps([asdict(belief) for belief in beliefs])


def from_json(text: str) -> list[Belief]:
    """Raises InvalidBeliefError for anything but beliefs."""
    try:
        body = json.loads(text)
        return [
            Belief(
                str(item["drafter"]),
                str(item["label"]),
                tuple(float(a) for a in item["conditional"]),
                tuple(float(n) for n in item["exposures"]),
            )
            for item in body
        ]
    except MALFORMED as error:
        raise InvalidBeliefError(f"not beliefs: {error!r}") from error


def pool_groups(groups: Iterable[Iterable[tuple[Belief, float]]]) -> list[Belief]:
    """As `pool`, of groups that count the same, however much each of them has told."""
    told = []
    for group in map(list, groups):
        youngest = min((age for _, age in group), default=0.0)
        told += [(belief, youngest) for belief in pool(group)]
    return pool(told)


def pool(told: Iterable[tuple[Belief, float]]) -> list[Belief]:
    """One belief for every drafter and label, from beliefs and their ages in seconds."""
    sums: dict[tuple[str, str], list[list[float]]] = {}
    for belief, age in told:
        weight = 0.5 ** (max(0.0, age) / HALF_LIFE_SECONDS)
        sum_ = sums.setdefault((belief.drafter, belief.label), [])
        sum_ += [[0.0, 0.0] for _ in range(len(belief.conditional) - len(sum_))]
        for position, a, n in zip(sum_, belief.conditional, belief.exposures, strict=False):
            position[0] += weight * n
            position[1] += weight * n * a
    found = []
    for (drafter, label), positions in sorted(sums.items()):
        if not positions or positions[0][0] < _LEAST_EXPOSURES:
            continue
        # The first position has the most behind it: later ones keep their share of it.
        keep = min(1.0, WARM_EXPOSURES / max(n for n, _ in positions))
        found.append(
            Belief(
                drafter, label,
                tuple(min(1.0, s / n) if n > 0 else 0.0 for n, s in positions),
                tuple(n * keep for n, _ in positions),
            )
        )  # fmt: skip
    return found
