"""Counts how long a policy takes to follow a sudden change."""

import numpy as np
from numpy.typing import NDArray

from simulator.comparison.truth import Truth
from simulator.engine import RunResult
from simulator.surface import MINIMAL_SHARE, CostSurface
from simulator.workload import ClosedLoop

# A policy has recovered when the mean of so many steps reaches this share of the best arm.
_RECOVERED_STEPS = 10
_RECOVERED_SHARE = 0.95


def recovery_steps(workload: ClosedLoop, truth: Truth, run: RunResult) -> list[float]:
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
        quality = _quality(truth.of(now.pool).expected, truth.surface, run, first, end)
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
    rates = (1 + expected)[:, None] / np.maximum(plain + context, MINIMAL_SHARE * plain)
    quality: NDArray[np.float64] = rates[arms, np.arange(len(arms))] / rates.max(axis=0)
    return quality
