"""A run as a coarse picture: what ran when, ours beside the oracle."""

import numpy as np
from numpy.typing import NDArray

from controller.simulation.engine import RunResult
from controller.simulation.results import Timeline
from controller.simulation.surface import CostSurface

_POINTS = 200


def timeline(surface: CostSurface, ours: RunResult, oracle: RunResult) -> Timeline:
    """Divides both runs into about `_POINTS` stretches of equal numbers of steps."""
    batch, gamma, rate, ends = _coarse(surface, ours)
    _, oracle_gamma, oracle_rate, oracle_ends = _coarse(surface, oracle)
    return Timeline(
        seconds=tuple(ends),
        batch_size=tuple(batch),
        gamma=tuple(gamma),
        rate=tuple(rate),
        oracle_seconds=tuple(oracle_ends),
        oracle_gamma=tuple(oracle_gamma),
        oracle_rate=tuple(oracle_rate),
    )


def _coarse(
    surface: CostSurface, run: RunResult
) -> tuple[list[float], list[float], list[float], list[float]]:
    trace = run.trace
    gammas = np.array([arm.gamma for arm in surface.arms], dtype=np.float64)
    parts = np.array_split(np.arange(len(trace.arms)), min(_POINTS, len(trace.arms)))
    ends = np.array(trace.ends)
    tokens = np.array(trace.tokens, dtype=np.float64)
    begins = np.concatenate(([0.0], ends[:-1]))
    batch_sizes, arms = np.array(trace.batch_sizes), np.array(trace.arms)

    def mean(values: NDArray[np.float64]) -> list[float]:
        return [round(float(values[part].mean()), 3) for part in parts]

    rate = [
        round(float(tokens[p].sum() / max(ends[p[-1]] - begins[p[0]], 1e-12)), 1) for p in parts
    ]
    return mean(batch_sizes), mean(gammas[arms]), rate, [float(ends[p[-1]]) for p in parts]
