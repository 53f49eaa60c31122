"""A plan's rows under overrides: where they end, and what may run in each."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.overrides import Limits, Override, batch_edges, merge, merge_regime
from controller.core.types import MAX_PLAN_ROWS, Arm, EngineSpec, Regime, RegimeMode


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The rows of an engine's plans.

    upper: largest batch of each row, ascending.  bucket: [rows] the cost bucket that each is in.
    limits: of each row.  legal: [arms, rows], at least one arm in each; None when everything is.
    split: a bucket has more than one row.  named: all overrides that count anywhere.
    """

    upper: tuple[int, ...]
    bucket: NDArray[np.int64]
    limits: tuple[Limits, ...]
    legal: NDArray[np.bool_] | None
    split: bool
    regime: Regime
    named: tuple[str, ...]

    def row_of(self, batch_size: int) -> int:
        """Index of the row that serves a batch size."""
        return min(bisect_left(self.upper, batch_size), len(self.upper) - 1)


def rows_under(
    overrides: Iterable[Override], spec: EngineSpec, buckets: Sequence[int], arms: Sequence[Arm]
) -> PlanRows:
    """The rows: one a bucket, and a bucket is split where other overrides begin to count.

    Where that would be more rows than an engine takes, what counts at a bucket's largest batch
    counts in all of it.
    """
    overrides = tuple(overrides)
    upper = tuple(sorted({*buckets, *batch_edges(overrides, spec)}))
    if len(upper) > MAX_PLAN_ROWS:
        upper = tuple(buckets)
    bucket = np.array([bisect_left(buckets, size) for size in upper], dtype=np.int64)
    limits = tuple(merge(overrides, spec, size) for size in upper)
    legal = None
    if any(limit.overrides for limit in limits):
        legal = np.array([_or_off(limit.legal(arms), arms) for limit in limits]).T
    regime, _, by = merge_regime(overrides, spec)
    named = {*by, *(name for limit in limits for name in limit.overrides)}
    return PlanRows(
        upper, bucket, limits, legal, len(upper) > len(buckets), _possible(regime, spec),
        tuple(sorted(named)),
    )  # fmt: skip


def _or_off(legal: list[bool], arms: Sequence[Arm]) -> list[bool]:
    """At least one arm: where none is left those with the shortest draft, gamma = 0 if there is."""
    if any(legal):
        return legal
    least = min(arm.gamma for arm in arms)
    return [arm.gamma == least for arm in arms]


def _possible(regime: Regime | None, spec: EngineSpec) -> Regime:
    """The pinned regime where the engine can run it, else OFF."""
    able = {
        RegimeMode.OFF: True,
        RegimeMode.ONLINE: spec.capabilities.can_update_online,
        RegimeMode.COLLECT: spec.capabilities.can_collect,
    }
    return regime if regime is not None and able[regime.mode] else Regime()
