"""Policies that know the future: the oracle of the comparison, and the truth it is made of."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.simulation.engine import RunResult
from controller.simulation.policy import ArmChoice, StepRecord
from controller.simulation.results import PolicyOrigin
from controller.simulation.surface import CostSurface
from controller.simulation.workload import ClosedLoop, RequestPool

# A policy has recovered when the mean of so many steps reaches this share of the best arm.
_RECOVERED_STEPS = 10
_RECOVERED_SHARE = 0.95


class SegmentSchedule:
    """One arm per segment of the workload; the engine says which segment has begun."""

    origin = PolicyOrigin.HINDSIGHT

    def __init__(self, arm_by_segment: Sequence[int]) -> None:
        self._arms = [ArmChoice(arm) for arm in arm_by_segment]
        self._current = self._arms[0]

    def enter(self, segment: int) -> None:
        """The next step belongs to this segment; the last arm serves beyond the known ones."""
        self._current = self._arms[min(segment, len(self._arms) - 1)]

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """The segment's arm."""
        del batch_size, now
        return self._current

    def observe(self, record: StepRecord, now: float) -> None:
        """Nothing is learnt: everything is known."""


def best_by_segment(static_runs: Sequence[RunResult]) -> list[int]:
    """Returns per segment the arm with the most tokens per second in its own static run."""
    segments = max(len(run.segment_tokens) for run in static_runs)
    best = []
    for segment in range(segments):
        rates = [
            run.segment_tokens[segment] / run.segment_seconds[segment]
            if segment < len(run.segment_tokens) and run.segment_seconds[segment] > 0
            else 0.0
            for run in static_runs
        ]
        best.append(int(np.argmax(rates)))
    return best


def true_expected(pool: RequestPool, surface: CostSurface) -> NDArray[np.float64]:
    """[arms] of E[accepted | gamma] over the pool's positions, draft tokens."""
    return np.array(
        [
            float(np.minimum(pool.accepted[arm.drafter], arm.gamma).mean()) if arm.gamma else 0.0
            for arm in surface.arms
        ]
    )


def recovery_steps(workload: ClosedLoop, surface: CostSurface, run: RunResult) -> list[float]:
    """Counts the steps after every sudden change until the run's arms match the best one again.

    Good: the mean true value of `_RECOVERED_STEPS` steps reaches `_RECOVERED_SHARE` of the best
    arm's at the same batch and context.  A phase in which that never comes counts whole.
    Changes that seep in with the requests (not `at_once`, another pool) have no such moment.
    """
    trace = run.trace
    starts = [*trace.phase_starts, (len(trace.arms), -1)]
    found = []
    for (_, before), (first, phase), (end, _) in zip(starts, starts[1:], starts[2:], strict=False):
        now, then = workload.phases[phase], workload.phases[before]
        if not now.at_once and now.pool is not then.pool:
            continue
        quality = _quality(true_expected(now.pool, surface), surface, run, first, end)
        window = np.convolve(quality, np.ones(_RECOVERED_STEPS) / _RECOVERED_STEPS, "valid")
        good = np.flatnonzero(window >= _RECOVERED_SHARE)
        found.append(float(good[0]) if len(good) else float(end - first))
    return found


def _quality(
    expected: NDArray[np.float64], surface: CostSurface, run: RunResult, first: int, end: int
) -> NDArray[np.float64]:
    """[steps] true value of the arm that ran over the best arm's, at the step's batch and kv."""
    trace = run.trace
    arms = np.array(trace.arms[first:end])
    batch = np.array(trace.batch_sizes[first:end])
    kv = np.array(trace.kv_tokens[first:end])
    plain = surface.seconds[:, np.minimum(batch, surface.max_batch_size)]
    context = surface.kv_seconds[:, None] * (kv - batch * surface.kv_reference)
    rates = (1 + expected)[:, None] / np.maximum(plain + context, 0.1 * plain)
    quality: NDArray[np.float64] = rates[arms, np.arange(len(arms))] / rates.max(axis=0)
    return quality
