"""What a step costs: C(d, B, gamma, kv), measured once and refined by live steps.

    C = (grid[arm, B] + k_kv * (kv - B * kv_ref)) * common[B] * specific[arm, B]

`grid` comes from a profile (interpolated in log B, monotone in B and gamma) or, without one, from
a prior of the form t0 * (1 + B (gamma + 1) / B_sat + gamma * d), which is marked as such and only
serves until live steps have corrected it.

Live steps move two residuals, both in log space.  `common` follows quickly and moves every arm of
a batch size alike, since a machine that slows down slows all of them: were it charged to the arm
that happens to run, every noisy minute would look like a reason to switch.  `specific` follows
slowly.  A step far outside the usual scatter is dropped, unless it keeps happening; the specific
residual is bounded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.profile import Profile, ProfileCell
from controller.core.settings import PlannerSettings
from controller.core.types import Arm

# Shape of the prior: tokens per step at which compute starts to show, cost of one draft pass
# relative to a target pass, and the seconds that the first live steps correct.
_PRIOR_SATURATION_TOKENS = 256.0
_PRIOR_DRAFT_SHARE = 0.12
_PRIOR_STEP_SECONDS = 0.02

_COMMON_RATE = 0.1
_SPECIFIC_RATE = 0.02
# How much of a correction adjacent batch sizes take over.
_NEIGHBOUR_SHARE = 0.5
_OUTLIER_SCALES = 6.0
_OUTLIER_FLOOR = 0.4
_OUTLIERS_THAT_ARE_NEWS = 6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step for every (arm, bucket), and what is known about each.

    seconds, optimistic_seconds: [arms, buckets]; extrapolated: [arms, buckets] of bool.
    """

    seconds: NDArray[np.float64]
    optimistic_seconds: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]


class CostModel:
    """Costs of `arms` at the batch sizes `buckets` (ascending).  One object per engine."""

    def __init__(
        self,
        arms: Sequence[Arm],
        buckets: Sequence[int],
        profile: Profile | None,
        settings: PlannerSettings,
    ) -> None:
        # A digest of the whole file: made once, read at every plan.
        self.profile_id = profile.profile_id if profile else ""
        self._arms = {arm: i for i, arm in enumerate(arms)}
        self._buckets = np.asarray(buckets, dtype=np.float64)
        self._bucket_list = list(buckets)
        shape = (len(arms), len(buckets))
        if profile is None:
            self._grid = _prior_grid(arms, self._buckets)
            self._extrapolated = np.zeros(shape, dtype=bool)
            self._kv_reference, self._kv_rate = 0.0, 0.0
            drift = settings.cost_drift_max_prior
            self._evidence_start, self._sigma = 0.0, 0.25
        else:
            self._grid, self._extrapolated = _profiled_grid(arms, self._buckets, profile)
            self._kv_reference = profile.kv_tokens_per_sequence
            self._kv_rate = profile.seconds_per_kv_token
            drift = settings.cost_drift_max_profiled
            self._evidence_start, self._sigma = 4.0, 0.2
        self._drift_max = math.log(drift)
        self._common = np.zeros(len(buckets))
        self._common_evidence = np.full(len(buckets), self._evidence_start)
        self._specific = np.zeros(shape)
        self._evidence = np.full(shape, self._evidence_start)
        self._scatter = 0.05
        self._outliers_in_a_row = 0
        self.rejected = 0

    def bucket_of(self, batch_size: int) -> int:
        """Index of the bucket that serves a batch size."""
        return min(int(np.searchsorted(self._buckets, batch_size)), len(self._bucket_list) - 1)

    def observe(self, arm: Arm, batch_size: int, kv_tokens: int, step_seconds: float) -> None:
        """Takes one plain step (the caller leaves out distorted ones)."""
        i, j = self._arms[arm], self.bucket_of(batch_size)
        base = self._grid[i, j] + self._kv_rate * (kv_tokens - batch_size * self._kv_reference)
        floor = 0.1 * float(self._grid[i, j])
        predicted = math.log(max(base, floor)) + float(self._common[j] + self._specific[i, j])
        error = math.log(step_seconds) - predicted
        if self._is_outlier(error):
            return
        self._scatter += 0.02 * (min(abs(error), 1.0) - self._scatter)
        self._learn(i, j, error)

    def _is_outlier(self, error: float) -> bool:
        if abs(error) <= max(_OUTLIER_FLOOR, _OUTLIER_SCALES * self._scatter):
            self._outliers_in_a_row = 0
            return False
        self._outliers_in_a_row += 1
        if self._outliers_in_a_row >= _OUTLIERS_THAT_ARE_NEWS or self._common_evidence.max() < 3:
            return False
        self.rejected += 1
        return True

    def _learn(self, i: int, j: int, error: float) -> None:
        if not self._common_evidence.any():
            # The very first step fixes the scale for every batch size.
            self._common += error
            self._common_evidence += 1.0
            return
        common_rate = max(_COMMON_RATE, 1.0 / (1.0 + self._common_evidence[j]))
        specific_rate = max(_SPECIFIC_RATE, 0.5 / (1.0 + self._evidence[i, j]))
        self._common_evidence[j] += 1.0
        self._evidence[i, j] += 1.0
        for k, share in ((j - 1, _NEIGHBOUR_SHARE), (j, 1.0), (j + 1, _NEIGHBOUR_SHARE)):
            if 0 <= k < len(self._bucket_list):
                self._common[k] += common_rate * share * error
                moved = self._specific[i, k] + specific_rate * share * error
                self._specific[i, k] = min(self._drift_max, max(-self._drift_max, moved))

    def specific_drift(self) -> NDArray[np.float64]:
        """Factors by which live steps have moved single cells: [arms, buckets], 1 = unmoved."""
        return np.exp(self._specific)

    def costs(self, kv_tokens_per_sequence: float, confidence_z: float) -> Costs:
        """Costs at the buckets' batch sizes and this mean context length."""
        kv_seconds = self._kv_rate * (kv_tokens_per_sequence - self._kv_reference) * self._buckets
        base = np.maximum(self._grid + kv_seconds, 0.1 * self._grid)
        seconds = base * np.exp(self._common + self._specific)
        doubt = self._sigma / np.sqrt(1.0 + self._evidence)
        return Costs(seconds, seconds * np.exp(-confidence_z * doubt), self._extrapolated)


def _prior_grid(arms: Sequence[Arm], buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    gammas = np.array([[float(arm.gamma)] for arm in arms])
    tokens = buckets * (gammas + 1)
    relative: NDArray[np.float64] = (
        1 + tokens / _PRIOR_SATURATION_TOKENS + _PRIOR_DRAFT_SHARE * gammas
    )
    return _PRIOR_STEP_SECONDS * relative


def _profiled_grid(
    arms: Sequence[Arm], buckets: NDArray[np.float64], profile: Profile
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[arms, buckets] seconds from the profile's cells, and where they left the measured grid."""
    sizes = np.array(sorted({c.batch_size for c in profile.cells}), dtype=np.float64)
    grid = np.empty((len(arms), len(buckets)))
    outside = np.zeros(grid.shape, dtype=bool)
    for drafter in {arm.drafter for arm in arms}:
        cells = [c for c in profile.cells if c.drafter == drafter]
        if not cells:
            # An arm without a measurement is never silently cheap: it costs what the dearest does.
            rows = [i for i, arm in enumerate(arms) if arm.drafter == drafter]
            grid[rows] = max(c.step_seconds for c in profile.cells)
            outside[rows] = True
            continue
        gammas = np.array(sorted({c.gamma for c in cells}), dtype=np.float64)
        table = np.vstack([_over_batch(cells, int(g), sizes) for g in gammas])
        table = _monotone(_monotone(table, 0), 1)
        measured = (buckets >= sizes[0]) & (buckets <= sizes[-1])
        at_buckets = np.vstack([_interpolate(np.log(buckets), np.log(sizes), row) for row in table])
        for i, arm in enumerate(arms):
            if arm.drafter == drafter:
                for j in range(len(buckets)):
                    grid[i, j] = _interpolate(
                        np.array([float(arm.gamma)]), gammas, at_buckets[:, j]
                    )[0]
                outside[i] = ~measured | (not gammas[0] <= arm.gamma <= gammas[-1])
    return grid, outside


def _over_batch(
    cells: Sequence[ProfileCell], gamma: int, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    mine = sorted((c.batch_size, c.step_seconds) for c in cells if c.gamma == gamma)
    x = np.log(np.array([b for b, _ in mine], dtype=np.float64))
    return _interpolate(np.log(sizes), x, np.array([s for _, s in mine]))


def _interpolate(
    at: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Linear inside, continued with the last slope (never downwards past the end) outside."""
    inside = np.interp(at, x, y)
    if len(x) < 2:
        return inside
    right = (y[-1] - y[-2]) / (x[-1] - x[-2])
    left = (y[1] - y[0]) / (x[1] - x[0])
    beyond = y[-1] + np.maximum(right, 0.0) * (at - x[-1])
    before = np.maximum(y[0] + np.maximum(left, 0.0) * (at - x[0]), 0.25 * y[0])
    return np.where(at > x[-1], beyond, np.where(at < x[0], before, inside))


def _monotone(table: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Never falling along the axis: the mean of the running maximum and the reversed minimum."""
    rising = np.maximum.accumulate(table, axis=axis)
    flipped = np.flip(np.minimum.accumulate(np.flip(table, axis), axis=axis), axis)
    return (rising + flipped) / 2
