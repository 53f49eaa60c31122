"""Carries acceptance estimates from one session to the next, so that a new one starts warm.

A `Belief` is one engine's estimate for one drafter (and one request class).  Those of several
engines are pooled position by position, weighted by their exposures.  The weight of each halves
every `HALF_LIFE_SECONDS`, and all together count as at most `WARM_EXPOSURES`, so that live traffic
soon outweighs them.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from controller.core.engine_spec import MAX_GAMMA
from controller.core.errors import MALFORMED, InvalidBeliefError
from controller.core.recorded_state import recorded
from controller.core.step_report import MAX_LABEL_CHARACTERS

HALF_LIFE_SECONDS = 6 * 3600.0
WARM_EXPOSURES = 64.0
# A class or position with fewer exposures is left out.
_LEAST_EXPOSURES = 1.0


@recorded("belief")
@dataclass(frozen=True, slots=True)
class Belief:
    """Holds the estimated acceptance of one drafter.

    label: the request class, "" for all traffic.  conditional, exposures: a_k and the number of
    sequences it is based on, k = 1..gamma_max.  Raises InvalidBeliefError for values out of range.
    """

    drafter: str
    label: str
    conditional: tuple[float, ...]
    exposures: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.conditional) != len(self.exposures) or len(self.conditional) > MAX_GAMMA:
            raise InvalidBeliefError(
                f"{len(self.conditional)} means and {len(self.exposures)} exposures: the numbers "
                f"must be equal and at most {MAX_GAMMA}"
            )
        if len(self.label) > MAX_LABEL_CHARACTERS:
            raise InvalidBeliefError(
                f"a label of {len(self.label)} characters is longer than {MAX_LABEL_CHARACTERS}"
            )
        if not all(0 <= a <= 1 for a in self.conditional):
            raise InvalidBeliefError(f"means {self.conditional} must lie in [0, 1]")
        if not all(0 <= n < math.inf for n in self.exposures):
            raise InvalidBeliefError(f"exposures {self.exposures} must be finite and not negative")


def to_json(beliefs: Sequence[Belief]) -> str:
    """Serialises the estimates for a store."""
    return json.dumps([asdict(belief) for belief in beliefs])


def from_json(text: str) -> list[Belief]:
    """Reads what `to_json` wrote.  Raises InvalidBeliefError for anything else."""
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
        raise InvalidBeliefError(
            f"the text does not contain acceptance estimates: {error!r}"
        ) from error


def pool_groups(groups: Iterable[Iterable[tuple[Belief, float]]]) -> list[Belief]:
    """Pools groups of estimates so that every group has the same weight, whatever its size."""
    told = []
    for group in map(list, groups):
        youngest = min((age for _, age in group), default=0.0)
        told += [(belief, youngest) for belief in pool(group)]
    return pool(told)


def pool(told: Iterable[tuple[Belief, float]]) -> list[Belief]:
    """Pools estimates, given with their ages in seconds, into one per drafter and label."""
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
        # The position with the most exposures is limited; the others keep their ratio to it.
        keep = min(1.0, WARM_EXPOSURES / max(n for n, _ in positions))
        found.append(
            Belief(
                drafter, label,
                tuple(min(1.0, s / n) if n > 0 else 0.0 for n, s in positions),
                tuple(n * keep for n, _ in positions),
            )
        )  # fmt: skip
    return found
