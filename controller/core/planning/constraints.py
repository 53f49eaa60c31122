"""Determines a plan's rows: their batch sizes, and the arms that may run in each."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import (
    MAX_GAMMA,
    Arm,
    EngineSpec,
    LostCapability,
    lost_capability_of_all,
)
from controller.core.plan import MAX_PLAN_ROWS, Regime, RegimeMode
from controller.core.planning.overrides import (
    Limits,
    Override,
    batch_edges,
    merge_regime,
    merge_sorted,
    sort_by_strength,
)
from controller.core.planning.token_time import RowBounds, TokenTimeBound, token_time_bounds

# Maximum cells (arms times rows) of a plan: the work to make one grows with them.
_PLAN_CELLS_MAX = 8192


@dataclass(frozen=True, slots=True)
class RowConstraints:
    """Holds the rows of an engine's plans.

    upper_batch_sizes: largest batch of each row, ascending.  cost_buckets: [rows], the cost bucket
    of each row. limits: of each row.  possible: [arms, rows], arms that the engine can run;
    feasible: those that the overrides also allow, at least one arm in each row; None if all arms
    are.  is_emptied: rows in which the overrides allow no arm that the engine can run, or pin a
    lost drafter, so that the shortest draft runs.  has_split_buckets: a bucket has more than one
    row.  override_regime: the regime of online updates set by overrides, otherwise None;
    refused_regime: the requested regime if the engine cannot run it.  override_ids: ids of all
    overrides that affect any row.  lost: the engine's lost capabilities. bounds: of each row on the
    time per output token; empty if no row has one.
    """

    upper_batch_sizes: tuple[int, ...]
    cost_buckets: NDArray[np.int64]
    limits: tuple[Limits, ...]
    possible: NDArray[np.bool_] | None
    feasible: NDArray[np.bool_] | None
    is_emptied: tuple[bool, ...]
    has_split_buckets: bool
    override_regime: Regime | None
    refused_regime: Regime | None
    override_ids: tuple[str, ...]
    lost: tuple[LostCapability, ...] = ()
    bounds: tuple[TokenTimeBound | None, ...] = ()

    def row_of(self, batch_size: int) -> int:
        """Returns the index of the row that serves a batch size."""
        return min(bisect_left(self.upper_batch_sizes, batch_size), len(self.upper_batch_sizes) - 1)

    def arms_within_bounds(
        self, arms: Sequence[Arm], tpot_seconds: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Returns [arms, rows], which arms may run and meet the row's bound.

        tpot_seconds: [arms, rows] expected seconds between a sequence's output tokens.
        """
        is_within_bounds = (
            np.ones(tpot_seconds.shape, dtype=bool) if self.feasible is None else self.feasible
        )
        if self.bounds:
            is_within_bounds = is_within_bounds & RowBounds(arms, self.bounds).arms_within_bounds(
                tpot_seconds, None, 0.0
            )
        return is_within_bounds


def overrides_for_engine(overrides: Iterable[Override], spec: EngineSpec) -> tuple[Override, ...]:
    """Returns the overrides whose scope covers this engine, at any batch size, ordered by id."""
    applicable = (override for override in set(overrides) if override.scope.covers(spec))
    return tuple(sorted(applicable, key=attrgetter("override_id")))


def constrain_rows(
    overrides: Iterable[Override],
    spec: EngineSpec,
    buckets: Sequence[int],
    arms: Sequence[Arm],
    tpot_max_seconds: float = 0.0,
) -> RowConstraints:
    """Makes one row per bucket, and splits a bucket where overrides or batch limits change.

    If that gives more rows than an engine accepts, buckets are not split: the constraints at a
    bucket's largest batch then apply to the whole bucket.  tpot_max_seconds: the setting's bound on
    the time per output token, 0 = none.
    """
    overrides = tuple(overrides)
    graph_limit_ends = {largest for drafter in spec.drafters for _, largest in drafter.batch_limits}
    graph_limit_ends = {end for end in graph_limit_ends if 0 < end < spec.max_batch_size}
    upper_batch_sizes = tuple(sorted({*buckets, *batch_edges(overrides, spec), *graph_limit_ends}))
    if len(upper_batch_sizes) > min(MAX_PLAN_ROWS, max(len(buckets), _PLAN_CELLS_MAX // len(arms))):
        upper_batch_sizes = tuple(buckets)
    cost_buckets = np.array(
        [bisect_left(buckets, size) for size in upper_batch_sizes], dtype=np.int64
    )
    applicable = sort_by_strength(o for o in overrides if o.scope.covers(spec))
    limits = tuple(merge_sorted(applicable, size) for size in upper_batch_sizes)
    possible: NDArray[np.bool_] | None = None
    feasible: NDArray[np.bool_] | None = None
    if spec.lost or any(drafter.batch_limits for drafter in spec.drafters):
        possible = np.array(
            [[spec.is_prepared(arm, size) for size in upper_batch_sizes] for arm in arms]
        )
        possible[[spec.lost_capability_of(arm) is not None for arm in arms]] = False
        if spec.lost:
            # If every arm is lost, the engine still has to run one.
            possible[:, possible.sum(axis=0) == 0] = _mark_shortest(arms, None)[:, None]
        feasible = possible
    is_emptied: NDArray[np.bool_] = np.zeros(len(upper_batch_sizes), dtype=np.bool_)
    if any(limit.overrides for limit in limits):
        feasible_by_limit = {limit: limit.feasible_arms(arms) for limit in set(limits)}
        feasible = np.array([feasible_by_limit[limit] for limit in limits], dtype=np.bool_).T
        if possible is not None:
            feasible &= possible
        is_emptied = feasible.sum(axis=0) == 0
        for index, limit in enumerate(limits):
            if _pins_lost(limit, spec):
                is_emptied[index] = True
                feasible[:, index] = False
        for row in is_emptied.nonzero()[0]:
            feasible[:, row] = _mark_shortest(arms, None if possible is None else possible[:, row])
    requested_regime, updates_allowed, deciding_ids = merge_regime(overrides, spec)
    regime = (
        None
        if requested_regime is None and updates_allowed
        else _runnable_regime(requested_regime, spec)
    )
    override_ids = {*deciding_ids, *(name for limit in limits for name in limit.overrides)}
    return RowConstraints(
        upper_batch_sizes, cost_buckets, limits, possible, feasible, tuple(is_emptied.tolist()),
        len(upper_batch_sizes) > len(buckets), regime,
        None if requested_regime in {None, regime} else requested_regime,
        tuple(sorted(override_ids)), spec.lost, token_time_bounds(tpot_max_seconds, limits),
    )  # fmt: skip


def _pins_lost(limit: Limits, spec: EngineSpec) -> bool:
    """Returns whether every draft length above 0 of the pinned drafter is lost."""
    if limit.off or limit.gamma_max == 0:
        return False
    drafting_arms = (arm for arm in spec.arms if arm.drafter == limit.drafter and arm.gamma > 0)
    return lost_capability_of_all(spec, drafting_arms) is not None


def _mark_shortest(arms: Sequence[Arm], possible: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Marks the arms with the shortest draft, gamma = 0 if there is one."""
    gammas = np.array([arm.gamma for arm in arms])
    if possible is not None:
        gammas = np.where(possible, gammas, MAX_GAMMA + 1)
    shortest: NDArray[np.bool_] = gammas == gammas.min()
    return shortest


def _runnable_regime(regime: Regime | None, spec: EngineSpec) -> Regime:
    """Returns the pinned regime if the engine can run it, otherwise OFF."""
    can_run = {
        RegimeMode.OFF: True,
        RegimeMode.ONLINE: spec.remaining_capabilities.can_update_online,
        RegimeMode.COLLECT: spec.remaining_capabilities.can_collect,
    }
    return regime if regime is not None and can_run[regime.mode] else Regime()
