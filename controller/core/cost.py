"""What a step costs: C(d, B, gamma, kv), measured once and refined by live steps.

    log C = log(grid[arm, B] + k_kv * (kv - B * kv_ref)) + phi(arm, B) . w + cell[arm, B]

`grid` comes from a profile or, without one, from a prior, which is marked as such and only serves
until live steps have corrected it.

Live steps move w, a handful of coefficients with a Kalman filter: how slow the machine is right
now (quick: it moves every arm alike, so a slow minute is no reason to switch), how that grows with
B, and per drafter what drafting at all, each further pass, and the verified width add.  So one arm
that turns out dearer than its table moves all arms that share the reason.  What is left over goes
to the single cell and half of it to its neighbours in B.  A table that surprises is trusted less:
the doubt about cells never run grows with the errors found on first visits.

A step far outside the usual scatter is dropped, unless it keeps happening.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.core.grid import profiled_grid
from controller.core.prior import Prior, generic_prior
from controller.core.profile import Profile
from controller.core.settings import PlannerSettings
from controller.core.types import Arm

# Standard deviations of the log-coefficients before any live step: the machine, its growth with
# log B; per drafter: drafting at all, passes, width times log B.  Then that of a single cell.
_PROFILED_DOUBT = ((0.1, 0.08, 0.12, 0.12, 0.12), 0.03)
_ROOFLINE_DOUBT = ((1.0, 0.3, 0.25, 0.25, 0.2), 0.08)
_PRIOR_DOUBT = ((3.0, 0.6, 0.3, 0.5, 0.4), 0.1)
# How far they may wander in one step.
_WANDER = (0.005, 0.001, 0.0003, 0.0003, 0.0003)
# How quickly the machine's restlessness is learnt, an update; and the most of it (log seconds).
_PACE_RATE = 0.1
_PACE_MAX = 0.3
_NEIGHBOUR_SHARE = 0.5
_STEPS_AN_UPDATE = 8
_STEPS_KNOWN = 32
_CELL_RATE_MIN = 0.01
_SCATTER_START = 0.05
_SCATTER_MIN = 0.01
_SCATTER_RATE = 0.02
_OUTLIER_SCALES = 6.0
_OUTLIER_FLOOR = 0.4
_OUTLIERS_THAT_ARE_NEWS = 6
_SURPRISE_RATE = 0.2
_SURPRISE_MAX = 100.0
# How far surprise may widen the doubt about the coefficients, as a factor of their variance.
_DOUBT_GROWTH_MAX = 9.0


_Number = TypeVar("_Number", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Costs:
    """seconds: [arms, buckets] of a step; extrapolated: [arms, buckets], outside of the profile."""

    seconds: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CostDoubt:
    """How uncertain costs were at one moment.

    features: [coefficients, arms, buckets].  covariance: [coefficients, coefficients].  steps:
    [arms, buckets] seen in each cell.  cell: variance of what a single cell adds before any step;
    noise: variance of one step.
    """

    features: NDArray[np.float64]
    covariance: NDArray[np.float64]
    steps: NDArray[np.float64]
    cell: float
    noise: float

    def relative(self, bucket: int, current: int) -> NDArray[np.float64]:
        """[arms] variance of log(C_arm / C_current) at a bucket."""
        phi = self.features[:, :, bucket]
        apart = phi - phi[:, current : current + 1]
        shared = np.einsum("pa,pq,qa->a", apart, self.covariance, apart)
        cells = _cell_variance(self.cell, self.noise, self.steps[:, bucket])
        doubt: NDArray[np.float64] = np.maximum(shared, 0.0) + cells + cells[current]
        doubt[current] = 0.0
        return doubt


@dataclass(slots=True)
class _Pending:
    """Errors of one cell since the last update."""

    total: float = 0.0
    steps: int = 0


class CostModel:
    """Costs of `arms` at the batch sizes `buckets` (ascending).  One object per engine.

    padded: a batch runs as large as its bucket (captured graphs); else at its own size.
    prior: for an engine without a profile; by default the generic one.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        buckets: Sequence[int],
        profile: Profile | None,
        settings: PlannerSettings,
        *,
        padded: bool = False,
        prior: Prior | None = None,
    ) -> None:
        # A digest of the whole file: made once, read at every plan.
        self.profile_id = profile.profile_id if profile else ""
        # Where the costs come from without a profile.
        self.prior = ""
        self._buckets = np.asarray(buckets, dtype=np.float64)
        self._bucket_list = [float(b) for b in buckets]
        self._padded = padded
        self._bucket_index = _bucket_index(buckets)
        shape = (len(arms), len(buckets))
        self._extrapolated = np.zeros(shape, dtype=bool)
        self._kv_reference, self._kv_rate = 0.0, 0.0
        if profile is not None:
            grid, self._extrapolated = profiled_grid(arms, self._buckets, profile)
            self._kv_reference = profile.kv_tokens_per_sequence
            self._kv_rate = profile.seconds_per_kv_token
            doubt = _PROFILED_DOUBT
        else:
            prior = prior or generic_prior(arms, buckets)
            grid, self._kv_rate, self.prior = prior.grid, prior.kv_rate, prior.name
            doubt = _ROOFLINE_DOUBT if prior.name == "roofline" else _PRIOR_DOUBT
        self._grid = grid
        self._grid_rows: list[list[float]] = grid.tolist()
        self.use_settings(settings)
        self._features = _features(arms, self._buckets)
        self._flat_features = self._features.reshape(len(self._features), -1)
        drafters = (len(self._features) - 2) // 3
        sigma = np.array([*doubt[0][:2], *(doubt[0][2:] * drafters)])
        self._wander = np.diag(np.square([*_WANDER[:2], *(_WANDER[2:] * drafters)]))
        self._weights = np.zeros(len(sigma))
        self._covariance = np.diag(sigma**2)
        self._covariance_start = float(np.trace(self._covariance))
        self._cell_sigma = doubt[1]
        self._cell = np.zeros(shape)
        self._cell_steps = np.zeros(shape)
        self._surprise = 1.0
        self._pace = 0.0
        self._last_cell = (-1, -1)
        self._scatter = _SCATTER_START
        self._outliers_in_a_row = 0
        self._pending: dict[tuple[int, int], _Pending] = {}
        self.rejected = 0
        self.steps = 0
        self._refresh()

    def use_settings(self, settings: PlannerSettings) -> None:
        """Live steps may move costs as far as these say from now on."""
        profiled, prior = settings.cost_drift_max_profiled, settings.cost_drift_max_prior
        self._drift_max = math.log(profiled if self.profile_id else prior)

    def bucket_of(self, batch_size: int) -> int:
        """Index of the bucket that serves a batch size."""
        index = self._bucket_index
        return index[batch_size] if batch_size < len(index) else len(self._bucket_list) - 1

    def predict(self, arm: int, batch_size: int, kv_tokens: int) -> float:
        """Seconds of a plain step of this arm (by index) at this very batch and context."""
        j = self.bucket_of(batch_size)
        base = self._base(arm, j, batch_size, kv_tokens)
        return base * math.exp(float(self._correction[arm, j]))

    def observe(
        self, arm: int, batch_size: int, expected_seconds: float, step_seconds: float
    ) -> None:
        """Takes one plain step (the caller leaves out distorted ones).

        expected_seconds: what `predict` gave for it.
        """
        error = math.log(step_seconds / expected_seconds)
        if self._is_outlier(error):
            return
        self.steps += 1
        if self.steps > 1:
            excess = min(abs(error), 0.5) - self._scatter
            self._scatter = max(_SCATTER_MIN, self._scatter + _SCATTER_RATE * excess)
        cell = (arm, self.bucket_of(batch_size))
        pending = self._pending.get(cell)
        if pending is None:
            pending = self._pending[cell] = _Pending()
        # Against the table itself: what is believed may have moved before this is learnt.
        pending.total += error + float(self._correction[cell])
        pending.steps += 1

    def _base(self, i: int, j: int, batch_size: int, kv_tokens: int) -> float:
        row, sizes = self._grid_rows[i], self._bucket_list
        grid, size = row[j], sizes[j]
        if batch_size != size and not self._padded:
            if j > 0 and batch_size < size:
                share = (batch_size - sizes[j - 1]) / (size - sizes[j - 1])
                grid = row[j - 1] + share * (grid - row[j - 1])
            size = batch_size
        else:
            size = batch_size
        return max(grid + self._kv_rate * (kv_tokens - size * self._kv_reference), 0.1 * grid)

    def _is_outlier(self, error: float) -> bool:
        if self.steps < 3 or abs(error) <= max(_OUTLIER_FLOOR, _OUTLIER_SCALES * self._scatter):
            self._outliers_in_a_row = 0
            return False
        self._outliers_in_a_row += 1
        if self._outliers_in_a_row >= _OUTLIERS_THAT_ARE_NEWS:
            return False
        self.rejected += 1
        return True

    def learn(self) -> None:
        """Takes what has been observed since the last call into the coefficients and cells."""
        # A well-known cell can wait for a few more steps: one update takes as long for all of them.
        ready = [
            cell for cell, pending in self._pending.items()
            if pending.steps >= _STEPS_AN_UPDATE or self._cell_steps[cell] < _STEPS_KNOWN
        ]  # fmt: skip
        for i, j in ready:
            pending = self._pending.pop((i, j))
            found = pending.total / pending.steps
            believed = float(self._features[:, i, j] @ self._weights + self._cell[i, j])
            self._learn_cell(i, j, found - believed, pending.steps)
        if ready:
            self._refresh()

    def _learn_cell(self, i: int, j: int, error: float, steps: int) -> None:
        phi = self._features[:, i, j]
        prior, noise = self._variances()
        cell_doubt = _cell_variance(prior, noise, float(self._cell_steps[i, j]))
        noise /= steps
        if (i, j) == self._last_cell:
            # Nothing changed but the time: what is more than scatter is the machine's pace.
            jump = min(max(error * error - cell_doubt - noise, 0.0), _PACE_MAX**2)
            self._pace += _PACE_RATE * (jump - self._pace)
        self._last_cell = (i, j)
        self._covariance += steps * self._wander
        self._covariance[0, 0] += self._pace
        spread = self._covariance @ phi
        total = float(phi @ spread) + cell_doubt + noise
        if self._cell_steps[i, j] == 0 and self.steps > steps:
            found = min(max(error * error / total, 0.0), _SURPRISE_MAX)
            self._surprise += _SURPRISE_RATE * (found - self._surprise)
            if found > 4:
                # The table is wrong by more than was thought possible: believe it less.
                room = _DOUBT_GROWTH_MAX * self._covariance_start / np.trace(self._covariance)
                self._covariance *= max(1.0, min(found / 2, float(room)))
                spread = self._covariance @ phi
                total = float(phi @ spread) + cell_doubt + noise
        gain = spread / total
        self._weights += gain * error
        self._covariance -= np.outer(gain, spread)
        left = error * (1 - float(phi @ gain))
        rate = max(cell_doubt / (cell_doubt + noise), min(1.0, _CELL_RATE_MIN * steps))
        self._cell_steps[i, j] += steps
        for k, share in ((j - 1, _NEIGHBOUR_SHARE), (j, 1.0), (j + 1, _NEIGHBOUR_SHARE)):
            if 0 <= k < len(self._bucket_list):
                moved = self._cell[i, k] + rate * share * left
                self._cell[i, k] = min(self._drift_max, max(-self._drift_max, moved))

    def _variances(self) -> tuple[float, float]:
        """Of what a single cell adds before any step, and of one step."""
        return self._cell_sigma**2 * max(1.0, self._surprise), (1.25 * self._scatter) ** 2

    def _refresh(self) -> None:
        shared = (self._weights @ self._flat_features).reshape(self._cell.shape)
        # The drift that matters to a choice is that between arms: it is bounded, the machine's not.
        machine = shared.min(axis=0)
        bounded = np.minimum(shared - machine, 2 * self._drift_max) + machine
        self._correction = bounded + self._cell
        self._factors: NDArray[np.float64] = np.exp(self._correction)

    def drift(self) -> NDArray[np.float64]:
        """Factors by which live steps have moved the table: [arms, buckets], 1 = unmoved."""
        return self._factors

    def costs(self, kv_tokens_per_sequence: float) -> Costs:
        """Costs at the buckets' batch sizes and this mean context length."""
        kv_seconds = self._kv_rate * (kv_tokens_per_sequence - self._kv_reference) * self._buckets
        base = np.maximum(self._grid + kv_seconds, 0.1 * self._grid)
        return Costs(base * self._factors, self._extrapolated)

    def doubt(self) -> CostDoubt:
        """How uncertain the costs are now; a copy, which does not change as the model learns."""
        return CostDoubt(
            self._features, self._covariance.copy(), self._cell_steps.copy(), *self._variances()
        )


def _cell_variance(prior: float, noise: float, steps: _Number) -> _Number:
    """Variance of what a single cell adds, after so many steps in it."""
    doubt: _Number = prior / (1 + steps * (prior / noise))
    return doubt


def _bucket_index(buckets: Sequence[int]) -> list[int]:
    """Bucket of every batch size up to the last bucket's: a look-up instead of a search."""
    index = [0] * (buckets[-1] + 1)
    j = 0
    for size in range(buckets[-1] + 1):
        if size > buckets[j]:
            j += 1
        index[size] = j
    return index


def _features(arms: Sequence[Arm], buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2 + 3 * drafters, arms, buckets]: 1, log B; per drafter drafts, passes, width * log B."""
    drafters = list(dict.fromkeys(arm.drafter for arm in arms))
    log_batch = np.log2(buckets) / max(1.0, math.log2(buckets[-1]))
    features = np.zeros((2 + 3 * len(drafters), len(arms), len(buckets)))
    features[0] = 1.0
    features[1] = log_batch
    for d, drafter in enumerate(drafters):
        deepest = max(1, *(arm.gamma for arm in arms if arm.drafter == drafter), 1)
        for i, arm in enumerate(arms):
            if arm.drafter == drafter and arm.gamma > 0:
                features[2 + 3 * d, i] = 1.0
                features[3 + 3 * d, i] = arm.gamma / deepest
                width = math.log2(arm.gamma + 1) / math.log2(deepest + 1)
                features[4 + 3 * d, i] = width * log_batch
    return features
