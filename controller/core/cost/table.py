"""Holds the step costs before any live step: [arms, buckets] of a profile or a prior, in order.

A profile's cells become a smoothed grid.  Without a profile, costs are estimated by a roofline for
known shapes, otherwise by a guess.  Both are marked (`prior` in `explain`, `profile-missing` on
every plan), and live steps correct both; the roofline needs less correction.  More work never costs
less, whatever was measured (`CostOrder`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import Profile
from controller.core.cost.roofline import device_from_data_sheet, prior_grid
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.model_shapes import InvalidShapeError
from controller.core.step_report import MAX_STEP_SECONDS

# The guess: tokens per step that double a step's time, cost of one draft pass relative to a target
# pass, and the seconds of a step, which the first live steps correct.
_SATURATION_TOKENS = 256.0
_DRAFT_PASS_SHARE = 0.12
_STEP_SECONDS = 0.02
# At any context, a step takes at least this share of its time at the table's context.
_MIN_SHARE = 0.1


class CostOrder:
    """Keeps step costs in order: more work never costs less, whatever was measured.

        C(d, B, gamma) <= C(d, B', gamma')   for gamma <= gamma' and B <= B'
        C(d, B, 0)     <= C(d', B', gamma')  for gamma' > 0 and B <= B', for all d and d'

    A step at gamma = 0 is the target's pass alone, and every other step contains that pass.  So the
    gain of an arm over plain decoding, (1 + E) C(0) / C(gamma), never exceeds its acceptance
    length.  Tables are [arms, buckets] with ascending buckets.

    off_arms, drafting_arms: arms by index, with gamma = 0 and above.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        drafters = dict.fromkeys(arm.drafter for arm in arms)
        self.off_arms = [i for i, arm in enumerate(arms) if arm.gamma == 0]
        self.drafting_arms = [i for i, arm in enumerate(arms) if arm.gamma]
        self._is_off = np.array([arm.gamma == 0 for arm in arms])
        # For each drafter, its arms by ascending draft length.
        self._chains = [
            np.array(
                sorted(
                    (i for i, arm in enumerate(arms) if arm.drafter == drafter),
                    key=lambda i: arms[i].gamma,
                ),
                dtype=np.int64,
            )
            for drafter in drafters
        ]
        # If the first arm of each pair costs no more than the second, all arms are in order.
        pairs = [(a, b) for chain in self._chains for a, b in pairwise(chain)]
        shortest_drafts = [
            next((i for i in chain if arms[i].gamma), None) for chain in self._chains
        ]
        pairs += [(a, b) for a in self.off_arms for b in shortest_drafts if b is not None]
        self._cheaper_arms, self._costlier_arms = (
            np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        )
        # For each arm, the arms that cost no less and those that cost no more, as runs of indices.
        self._costlier_runs = [_find_runs([_costs_no_more(a, b) for b in arms]) for a in arms]
        self._cheaper_runs = [_find_runs([_costs_no_more(b, a) for b in arms]) for a in arms]

    def lower_to_order(
        self, table: NDArray[np.float64], *, over_batches: bool = True
    ) -> NDArray[np.float64]:
        """Returns the largest ordered table that nowhere exceeds this one.

        over_batches: False to order the arms only, as batches may differ in context.
        """
        ordered = table if self._are_arms_ordered(table) else self._order_arms(table)
        if over_batches and not _are_batches_ordered(ordered):
            ordered = np.minimum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]
        return ordered

    def is_ordered(self, table: NDArray[np.float64]) -> bool:
        """Returns whether a table is in order."""
        return self._are_arms_ordered(table) and _are_batches_ordered(table)

    def _are_arms_ordered(self, table: NDArray[np.float64]) -> bool:
        cheaper, costlier = (
            table.take(self._cheaper_arms, axis=0),
            table.take(self._costlier_arms, axis=0),
        )
        return not np.count_nonzero(costlier < cheaper)

    def _order_arms(self, table: NDArray[np.float64]) -> NDArray[np.float64]:
        ordered = table.copy()
        for chain in self._chains:
            longest_first = chain[::-1]
            ordered[longest_first] = np.minimum.accumulate(table[longest_first], axis=0)
        if self.off_arms and self.drafting_arms:
            cheapest_drafting = ordered[self.drafting_arms].min(axis=0)
            ordered[self.off_arms] = np.minimum(ordered[self.off_arms], cheapest_drafting)
        return ordered

    def restore_order(
        self, table: NDArray[np.float64], last_steps: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns a table in order; the more recent a cell, the less it changes.

        last_steps: [arms, buckets], the step at which each cell was updated last, 0: never.  The
        newest cell keeps its value, and every older one is clipped to the bounds set by newer
        cells.
        """
        lower_bound = np.zeros_like(table)
        upper_bound = np.full_like(table, np.inf)
        arms, buckets = np.nonzero(last_steps)
        newest_first = np.argsort(-last_steps[arms, buckets], kind="stable")
        for i, j in zip(arms[newest_first].tolist(), buckets[newest_first].tolist(), strict=True):
            value = min(max(table.item(i, j), lower_bound.item(i, j)), upper_bound.item(i, j))
            for run in self._costlier_runs[i]:
                costlier_bounds = lower_bound[run, j:]
                np.maximum(costlier_bounds, value, out=costlier_bounds)
            for run in self._cheaper_runs[i]:
                cheaper_bounds = upper_bound[run, : j + 1]
                np.minimum(cheaper_bounds, value, out=cheaper_bounds)
        # A table in order stays in order if it is clipped to bounds that are in order.
        return np.clip(self.lower_to_order(table), lower_bound, upper_bound)

    def reachable_arms(
        self, has_run: NDArray[np.bool_], is_sure: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Marks [arms] of each drafter up to the longest that ran, and one more if that is sure."""
        is_reachable = np.zeros_like(has_run)
        for chain in self._chains:
            run_positions = np.flatnonzero(has_run[chain])
            longest = int(run_positions[-1]) if len(run_positions) else -1
            extra_arms = (
                1 if longest < 0 or is_sure[chain[longest]] or self._is_off[chain[longest]] else 0
            )
            is_reachable[chain[: longest + 1 + extra_arms]] = True
        return is_reachable


def _costs_no_more(a: Arm, b: Arm) -> bool:
    """Returns whether a step of `a` costs no more than one of `b`, at the same batch size."""
    return (a.drafter == b.drafter and a.gamma <= b.gamma) or (a.gamma == 0 and b.gamma > 0)


def _find_runs(is_member: Sequence[bool]) -> list[slice]:
    """Returns the runs of consecutive members."""
    edges = [i for i, pair in enumerate(pairwise([False, *is_member, False])) if pair[0] != pair[1]]
    return [slice(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _are_batches_ordered(table: NDArray[np.float64]) -> bool:
    return not np.count_nonzero(table[:, 1:] < table[:, :-1])


def profiled_grid(
    arms: Sequence[Arm], buckets: NDArray[np.float64], profile: Profile
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns [arms, buckets]: the profile's seconds, and where they are extrapolated.

    Seconds never fall with B or gamma; they are interpolated in log B and linearly in gamma.
    """
    sizes = np.array(sorted({c.batch_size for c in profile.cells}), dtype=np.float64)
    grid = np.empty((len(arms), len(buckets)))
    is_extrapolated = np.zeros(grid.shape, dtype=bool)
    for drafter in {arm.drafter for arm in arms}:
        rows = [i for i, arm in enumerate(arms) if arm.drafter == drafter]
        cells = [c for c in profile.cells if c.drafter == drafter]
        if not cells:
            # An arm without a measurement must not look cheap: it costs what the slowest cell does.
            grid[rows] = max(c.step_seconds for c in profile.cells)
            is_extrapolated[rows] = True
            continue
        by_gamma: dict[int, list[tuple[int, float]]] = {}
        for c in cells:
            by_gamma.setdefault(c.gamma, []).append((c.batch_size, c.step_seconds))
        gammas = np.array(sorted(by_gamma), dtype=np.float64)
        table = np.vstack([_interpolate_batches(by_gamma[int(g)], sizes) for g in gammas])
        table = _make_monotone(_make_monotone(table, 0), 1)
        is_measured = (buckets >= sizes[0]) & (buckets <= sizes[-1])
        bucket_seconds = np.vstack(
            [_interpolate(np.log(buckets), np.log(sizes), row) for row in table]
        )
        arm_gammas = np.array([float(arms[i].gamma) for i in rows])
        for j in range(len(buckets)):
            grid[rows, j] = _interpolate(arm_gammas, gammas, bucket_seconds[:, j])
        for i in rows:
            is_extrapolated[i] = ~is_measured | (not gammas[0] <= arms[i].gamma <= gammas[-1])
    return grid, is_extrapolated


def _interpolate_batches(
    cells: Sequence[tuple[int, float]], sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolates one draft length's cells (batch size, step seconds) at other batch sizes."""
    ordered_cells = sorted(cells)
    x = np.log(np.array([b for b, _ in ordered_cells], dtype=np.float64))
    return _interpolate(np.log(sizes), x, np.array([s for _, s in ordered_cells]))


def _interpolate(
    targets: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolates y(x) linearly; outside, it continues the last slope, but not a falling one."""
    inside = np.interp(targets, x, y)
    if len(x) < 2:
        return inside
    right_slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    left_slope = (y[1] - y[0]) / (x[1] - x[0])
    extrapolated_right = y[-1] + np.maximum(right_slope, 0.0) * (targets - x[-1])
    extrapolated_left = np.maximum(
        y[0] + np.maximum(left_slope, 0.0) * (targets - x[0]), 0.25 * y[0]
    )
    return np.where(
        targets > x[-1], extrapolated_right, np.where(targets < x[0], extrapolated_left, inside)
    )


def _make_monotone(table: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Makes a table that never falls along the axis: mean of running maximum and minimum."""
    running_max = np.maximum.accumulate(table, axis=axis)
    running_min = np.flip(np.minimum.accumulate(np.flip(table, axis), axis=axis), axis)
    return (running_max + running_min) / 2


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Holds the prior costs of an engine without a profile.

    name: "roofline", or "generic" if a shape or the GPU's data sheet is unknown.  grid: [arms,
    buckets] seconds at kv = 0.  seconds_per_kv_token: seconds per KV token.
    """

    name: str
    grid: NDArray[np.float64]
    seconds_per_kv_token: float


def select_prior(spec: EngineSpec, arms: Sequence[Arm], buckets: Sequence[int]) -> CostPrior:
    """Returns the best prior for an engine that was not profiled."""
    shapes = {d.name: d.shape for d in spec.drafters if d.shape is not None}
    for drafter in spec.drafters:
        # A mixture's free drafter costs almost nothing.
        if drafter.mixture is not None and (main := shapes.get(drafter.mixture.main)) is not None:
            shapes[drafter.name] = main
    if spec.shape is None or len(shapes) < len(spec.drafters):
        return generic_prior(arms, buckets)
    try:
        gpus = max(1, spec.fingerprint.tensor_parallel_size)
        gpu = (
            device_from_data_sheet(spec.fingerprint.device)
            .with_typical_overheads()
            .with_tensor_parallel(gpus)
        )
        grid, rate = prior_grid(arms, shapes, buckets, spec.shape, gpu)
    except InvalidShapeError:
        # The GPU is not in the table, or a draft is longer than its block.
        return generic_prior(arms, buckets)
    if grid.max() <= MAX_STEP_SECONDS and rate <= MAX_STEP_SECONDS:
        return CostPrior("roofline", grid, rate)
    # Each number is possible, but their combination is not.
    return generic_prior(arms, buckets)


def generic_prior(arms: Sequence[Arm], buckets: Sequence[int]) -> CostPrior:
    """Guesses t0 * (1 + B (gamma + 1) / B_sat + gamma * d)."""
    gammas = np.array([[float(arm.gamma)] for arm in arms])
    tokens = np.asarray(buckets, dtype=np.float64) * (gammas + 1)
    relative: NDArray[np.float64] = 1 + tokens / _SATURATION_TOKENS + _DRAFT_PASS_SHARE * gammas
    return CostPrior("generic", _STEP_SECONDS * relative, 0.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds the seconds of a step, and which are extrapolated; both [arms, buckets]."""

    seconds: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]


class CostTable:
    """Prices `arms` at the batch sizes `buckets` (ascending); it never changes.

    padded, prior: as in `CostModel`.  profile_id: a digest of the profile, "" without one; prior:
    the source of the costs without a profile, otherwise "".  grid: [arms, buckets] seconds at the
    context `kv_reference` (tokens per sequence), in order.  extrapolated: [arms, buckets], whether
    the cell is outside of the profile.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        buckets: Sequence[int],
        profile: Profile | None,
        order: CostOrder,
        *,
        padded: bool,
        prior: CostPrior | None,
    ) -> None:
        # A digest of the whole file: computed once, read at every plan.
        self.profile_id = profile.profile_id if profile else ""
        self.prior = ""
        self.sizes = np.asarray(buckets, dtype=np.float64)
        self._sizes = [float(b) for b in buckets]
        self._padded = padded
        self.extrapolated = np.zeros((len(arms), len(buckets)), dtype=bool)
        self.kv_reference = 0.0
        if profile is not None:
            grid, self.extrapolated = profiled_grid(arms, self.sizes, profile)
            self.kv_reference = profile.kv_tokens_per_sequence
            self._seconds_per_kv_token = profile.seconds_per_kv_token
        else:
            prior = prior or generic_prior(arms, buckets)
            grid, self._seconds_per_kv_token, self.prior = (
                prior.grid,
                prior.seconds_per_kv_token,
                prior.name,
            )
        self.grid = order.lower_to_order(grid)
        self._min_seconds = _MIN_SHARE * self.grid
        self._rows: list[list[float]] = self.grid.tolist()

    def bucket_of(self, batch_size: int) -> int:
        """Returns the index of the bucket that serves a batch size."""
        return min(bisect_left(self._sizes, batch_size), len(self._sizes) - 1)

    def cell_seconds(self, arm: int, batch_size: int, kv_tokens: int) -> float:
        """Returns the seconds of a step of this arm (by index) at this batch and context."""
        row, sizes = self._rows[arm], self._sizes
        j = self.bucket_of(batch_size)
        grid, size = row[j], sizes[j]
        if not self._padded and j > 0 and batch_size < size:
            share = (batch_size - sizes[j - 1]) / (size - sizes[j - 1])
            grid = row[j - 1] + share * (grid - row[j - 1])
        context_seconds = self._seconds_per_kv_token * (kv_tokens - batch_size * self.kv_reference)
        return max(grid + context_seconds, _MIN_SHARE * grid)

    def seconds(self, kv_per_sequence: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [arms, buckets] seconds.  kv_per_sequence: tokens, one or [buckets]."""
        context_seconds = (
            self._seconds_per_kv_token * (kv_per_sequence - self.kv_reference) * self.sizes
        )
        return np.maximum(self.grid + context_seconds, self._min_seconds)
