"""Turns a profile's cells into a smoothed grid over arms and batch buckets."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm


def profiled_grid(
    arms: Sequence[Arm], buckets: NDArray[np.float64], profile: Profile
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns [arms, buckets]: the profile's seconds, and where they are extrapolated.

    Seconds never fall with B or gamma; they are interpolated in log B and linearly in gamma.
    """
    sizes = np.array(sorted({c.batch_size for c in profile.cells}), dtype=np.float64)
    grid = np.empty((len(arms), len(buckets)))
    outside = np.zeros(grid.shape, dtype=bool)
    for drafter in {arm.drafter for arm in arms}:
        rows = [i for i, arm in enumerate(arms) if arm.drafter == drafter]
        cells = [c for c in profile.cells if c.drafter == drafter]
        if not cells:
            # An arm without a measurement must not look cheap: it costs what the slowest cell does.
            grid[rows] = max(c.step_seconds for c in profile.cells)
            outside[rows] = True
            continue
        by_gamma: dict[int, list[tuple[int, float]]] = {}
        for c in cells:
            by_gamma.setdefault(c.gamma, []).append((c.batch_size, c.step_seconds))
        gammas = np.array(sorted(by_gamma), dtype=np.float64)
        table = np.vstack([_over_batch(by_gamma[int(g)], sizes) for g in gammas])
        table = _monotone(_monotone(table, 0), 1)
        measured = (buckets >= sizes[0]) & (buckets <= sizes[-1])
        at_buckets = np.vstack([_interpolate(np.log(buckets), np.log(sizes), row) for row in table])
        wanted = np.array([float(arms[i].gamma) for i in rows])
        for j in range(len(buckets)):
            grid[rows, j] = _interpolate(wanted, gammas, at_buckets[:, j])
        for i in rows:
            outside[i] = ~measured | (not gammas[0] <= arms[i].gamma <= gammas[-1])
    return grid, outside


def _over_batch(
    cells: Sequence[tuple[int, float]], sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolates one draft length's cells (batch size, step seconds) at other batch sizes."""
    mine = sorted(cells)
    x = np.log(np.array([b for b, _ in mine], dtype=np.float64))
    return _interpolate(np.log(sizes), x, np.array([s for _, s in mine]))


def _interpolate(
    at: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolates y(x) linearly; outside it keeps the last slope, never downwards past the end."""
    inside = np.interp(at, x, y)
    if len(x) < 2:
        return inside
    right = (y[-1] - y[-2]) / (x[-1] - x[-2])
    left = (y[1] - y[0]) / (x[1] - x[0])
    beyond = y[-1] + np.maximum(right, 0.0) * (at - x[-1])
    before = np.maximum(y[0] + np.maximum(left, 0.0) * (at - x[0]), 0.25 * y[0])
    return np.where(at > x[-1], beyond, np.where(at < x[0], before, inside))


def _monotone(table: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Makes a table that never falls along the axis: mean of running maximum and minimum."""
    rising = np.maximum.accumulate(table, axis=axis)
    flipped = np.flip(np.minimum.accumulate(np.flip(table, axis), axis=axis), axis)
    return (rising + flipped) / 2
