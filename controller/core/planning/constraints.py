"""Determines a plan's rows: their batch sizes, and the arms that may run in each."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA, Arm, EngineSpec, LostCapability, loss_of_all
from controller.core.plan import MAX_PLAN_ROWS, Regime, RegimeMode
from controller.core.planning.overrides import (
    Limits,
    Override,
    batch_edges,
    by_strength,
    merge_ordered,
    merge_regime,
)
from controller.core.planning.token_time import RowBounds, TokenTimeBound, bounds_of

# Maximum cells (arms times rows) of a plan: the work to make one grows with them.
_CELLS_MAX = 8192


@dataclass(frozen=True, slots=True)
class PlanRows:
    """Holds the rows of an engine's plans.

    upper: largest batch of each row, ascending.  bucket: [rows], the cost bucket of each row.
    limits: of each row.  possible: [arms, rows], arms that the engine can run; feasible: those that
    the overrides also allow, at least one arm in each row; None if all arms are.  emptied: rows in
    which the overrides allow no arm that the engine can run, or pin a lost drafter, so that the
    shortest draft runs.  split: a bucket has more than one row.  regime: the regime of online
    updates set by overrides, otherwise None; refused: the requested regime if the engine cannot run
    it.  named: ids of all overrides that affect any row.  lost: the engine's lost capabilities.
    bounds: of each row on the time per output token; empty if no row has one.
    """

    upper: tuple[int, ...]
    bucket: NDArray[np.int64]
    limits: tuple[Limits, ...]
    possible: NDArray[np.bool_] | None
    feasible: NDArray[np.bool_] | None
    emptied: tuple[bool, ...]
    split: bool
    regime: Regime | None
    refused: Regime | None
    named: tuple[str, ...]
    lost: tuple[LostCapability, ...] = ()
    bounds: tuple[TokenTimeBound | None, ...] = ()

    def row_of(self, batch_size: int) -> int:
        """Returns the index of the row that serves a batch size."""
        return min(bisect_left(self.upper, batch_size), len(self.upper) - 1)

    def keeping(self, arms: Sequence[Arm], tpot: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns [arms, rows], which arms may run and meet the row's bound.

        tpot: [arms, rows] expected seconds between a sequence's output tokens.
        """
        keeps = np.ones(tpot.shape, dtype=bool) if self.feasible is None else self.feasible
        if self.bounds:
            keeps = keeps & RowBounds(arms, self.bounds).keeping(tpot, None, 0.0)
        return keeps


def covering(overrides: Iterable[Override], spec: EngineSpec) -> tuple[Override, ...]:
    """Returns the overrides whose scope covers this engine, at any batch size, ordered by id."""
    mine = (override for override in set(overrides) if override.scope.covers(spec))
    return tuple(sorted(mine, key=attrgetter("override_id")))


def rows_under(
    overrides: Iterable[Override],
    spec: EngineSpec,
    buckets: Sequence[int],
    arms: Sequence[Arm],
    ceiling_seconds: float = 0.0,
) -> PlanRows:
    """Makes one row per bucket, and splits a bucket where overrides or batch limits change.

    If that gives more rows than an engine accepts, buckets are not split: the constraints at a
    bucket's largest batch then apply to the whole bucket.  ceiling_seconds: the setting's bound on
    the time per output token, 0 = none.
    """
    overrides = tuple(overrides)
    ends = {largest for drafter in spec.drafters for _, largest in drafter.batch_limits}
    ends = {end for end in ends if 0 < end < spec.max_batch_size}
    upper = tuple(sorted({*buckets, *batch_edges(overrides, spec), *ends}))
    if len(upper) > min(MAX_PLAN_ROWS, max(len(buckets), _CELLS_MAX // len(arms))):
        upper = tuple(buckets)
    bucket = np.array([bisect_left(buckets, size) for size in upper], dtype=np.int64)
    mine = by_strength(o for o in overrides if o.scope.covers(spec))
    limits = tuple(merge_ordered(mine, size) for size in upper)
    possible: NDArray[np.bool_] | None = None
    feasible: NDArray[np.bool_] | None = None
    if spec.lost or any(drafter.batch_limits for drafter in spec.drafters):
        possible = np.array([[spec.is_prepared(arm, size) for size in upper] for arm in arms])
        possible[[spec.loss_of(arm) is not None for arm in arms]] = False
        if spec.lost:
            # If every arm is lost, the engine still has to run one.
            possible[:, possible.sum(axis=0) == 0] = _shortest(arms, None)[:, None]
        feasible = possible
    emptied: NDArray[np.bool_] = np.zeros(len(upper), dtype=np.bool_)
    if any(limit.overrides for limit in limits):
        columns = {limit: limit.feasible(arms) for limit in set(limits)}
        feasible = np.array([columns[limit] for limit in limits], dtype=np.bool_).T
        if possible is not None:
            feasible &= possible
        emptied = feasible.sum(axis=0) == 0
        for index, limit in enumerate(limits):
            if _pins_lost(limit, spec):
                emptied[index] = True
                feasible[:, index] = False
        for row in emptied.nonzero()[0]:
            feasible[:, row] = _shortest(arms, None if possible is None else possible[:, row])
    asked, allowed, by = merge_regime(overrides, spec)
    regime = None if asked is None and allowed else _possible(asked, spec)
    named = {*by, *(name for limit in limits for name in limit.overrides)}
    return PlanRows(
        upper, bucket, limits, possible, feasible, tuple(emptied.tolist()),
        len(upper) > len(buckets), regime, None if asked in {None, regime} else asked,
        tuple(sorted(named)), spec.lost, bounds_of(ceiling_seconds, limits),
    )  # fmt: skip


def _pins_lost(limit: Limits, spec: EngineSpec) -> bool:
    """Returns whether every draft length above 0 of the pinned drafter is lost."""
    if limit.off or limit.gamma_max == 0:
        return False
    drafts = (arm for arm in spec.arms if arm.drafter == limit.drafter and arm.gamma > 0)
    return loss_of_all(spec, drafts) is not None


def _shortest(arms: Sequence[Arm], possible: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Marks the arms with the shortest draft, gamma = 0 if there is one."""
    gammas = np.array([arm.gamma for arm in arms])
    if possible is not None:
        gammas = np.where(possible, gammas, MAX_GAMMA + 1)
    shortest: NDArray[np.bool_] = gammas == gammas.min()
    return shortest


def _possible(regime: Regime | None, spec: EngineSpec) -> Regime:
    """Returns the pinned regime if the engine can run it, otherwise OFF."""
    able = {
        RegimeMode.OFF: True,
        RegimeMode.ONLINE: spec.able.can_update_online,
        RegimeMode.COLLECT: spec.able.can_collect,
    }
    return regime if regime is not None and able[regime.mode] else Regime()
