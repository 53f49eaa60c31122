"""Carries acceptance estimates from one session to the next, so that a new one starts warm.

A `AcceptanceSnapshot` is one engine's estimate for one drafter (and one request class).  Those of
several engines are pooled position by position, weighted by their exposures.  The weight of each
halves every `HALF_LIFE_SECONDS`, and all together count as at most `WARM_EXPOSURES`, so that live
traffic soon outweighs them.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from controller.core.engine_spec import MAX_GAMMA
from controller.core.errors import MALFORMED_JSON_ERRORS, InvalidBeliefError
from controller.core.recorded_state import recorded
from controller.core.step_report import MAX_LABEL_CHARACTERS

HALF_LIFE_SECONDS = 6 * 3600.0
WARM_EXPOSURES = 64.0
# A class or position with fewer exposures is left out.
_MIN_EXPOSURES = 1.0


@recorded("belief")
@dataclass(frozen=True, slots=True)
class AcceptanceSnapshot:
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
            raise InvalidBeliefError(f"means {self.conditional} must be in [0, 1]")
        if not all(0 <= n < math.inf for n in self.exposures):
            raise InvalidBeliefError(f"exposures {self.exposures} must be finite and not negative")


def to_json(snapshots: Sequence[AcceptanceSnapshot]) -> str:
    """Serialises the estimates for a store."""
    return json.dumps([asdict(snapshot) for snapshot in snapshots])


def from_json(text: str) -> list[AcceptanceSnapshot]:
    """Reads what `to_json` wrote.  Raises InvalidBeliefError for anything else."""
    try:
        body = json.loads(text)
        return [
            AcceptanceSnapshot(
                str(item["drafter"]),
                str(item["label"]),
                tuple(float(a) for a in item["conditional"]),
                tuple(float(n) for n in item["exposures"]),
            )
            for item in body
        ]
    except MALFORMED_JSON_ERRORS as error:
        raise InvalidBeliefError(
            f"the text does not contain acceptance estimates: {error!r}"
        ) from error


def pool_groups(
    groups: Iterable[Iterable[tuple[AcceptanceSnapshot, float]]],
) -> list[AcceptanceSnapshot]:
    """Pools groups of estimates so that every group has the same weight, whatever its size."""
    pooled = []
    for group in map(list, groups):
        youngest_age = min((age for _, age in group), default=0.0)
        pooled += [(snapshot, youngest_age) for snapshot in pool_snapshots(group)]
    return pool_snapshots(pooled)


def pool_snapshots(
    aged_snapshots: Iterable[tuple[AcceptanceSnapshot, float]],
) -> list[AcceptanceSnapshot]:
    """Pools estimates, given with their ages in seconds, into one per drafter and label."""
    sums: dict[tuple[str, str], list[list[float]]] = {}
    for snapshot, age in aged_snapshots:
        weight = 0.5 ** (max(0.0, age) / HALF_LIFE_SECONDS)
        position_sums = sums.setdefault((snapshot.drafter, snapshot.label), [])
        position_sums += [[0.0, 0.0] for _ in range(len(snapshot.conditional) - len(position_sums))]
        for position, a, n in zip(
            position_sums, snapshot.conditional, snapshot.exposures, strict=False
        ):
            position[0] += weight * n
            position[1] += weight * n * a
    pooled = []
    for (drafter, label), positions in sorted(sums.items()):
        if not positions or positions[0][0] < _MIN_EXPOSURES:
            continue
        # The position with the most exposures is limited; the others keep their ratio to it.
        kept_share = min(1.0, WARM_EXPOSURES / max(n for n, _ in positions))
        pooled.append(
            AcceptanceSnapshot(
                drafter, label,
                tuple(min(1.0, s / n) if n > 0 else 0.0 for n, s in positions),
                tuple(n * kept_share for n, _ in positions),
            )
        )  # fmt: skip
    return pooled
