"""Estimates the cost of a step, C(d, B, gamma, kv): measured once and refined by live steps.

    log C = log(grid[arm, B] + k_kv * (kv - B * kv_ref)) + phi(arm, B) . w + cell[arm, B]

`grid` comes from a profile or, without one, from a prior, which `explain` shows.

Live steps update w, a few coefficients, with a Kalman filter: the machine's present pace (it adapts
quickly and affects all arms alike, so a slow minute is no reason to switch), its growth with B,
and for each drafter the cost of drafting at all, of each further pass, and of the verified width.
So one arm that is more expensive than its table raises all arms that share the cause.  The residual
is added to the single cell, and half of it to its neighbours in B, but not from a cell that the
profile did not measure to one that it did.  The uncertainty of cells that have not run grows with
the errors found on first visits to other cells.

Two rules keep a slow minute from being charged to the arms that ran in it.  If the same cell runs
again and its time changes, only the machine can have changed; if the time of a known cell changes
abruptly, that is by far the most likely cause.  w then treats the change as pace, whatever the
other uncertainties.  And more work never costs less (`CostOrder`): where the estimates break that
order, older ones are moved and become uncertain.  In both cases gamma = 0 is due for a check.

A step far outside the usual scatter, or six times as fast as predicted, changes nothing until
another step of its cell confirms it, and then by the smaller error; a known cell needs six.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import Profile
from controller.core.cost.table import CostOrder, CostPrior, Costs, CostTable
from controller.core.cost.uncertainty import (
    CostUncertainty,
    arms_of_same_drafter,
    cell_variance,
    cost_features,
    near_buckets,
    prior_deviations,
    process_noise_covariance,
)
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

_SQRT_2 = math.sqrt(2)


@recorded("pending_errors", "steps", total="error_sum")
@dataclass(slots=True)
class _PendingErrors:
    """Sum of the errors of one cell since the last update."""

    error_sum: float = 0.0
    steps: int = 0


@recorded(
    "cost_model",
    "steps _cell_steps _correction _covariance _factors _kv_per_sequence _last_error "
    "_outliers_in_a_row _pace _pending _scatter _surprise _weights",
    derived="_bucket_is_new",
    added="_held",
    rejected="rejected_steps",
    cell="_cell_correction",
    cell_seen="_cell_last_step",
    disagreed="_disagreement",
    last_cell="_last_learnt_cell",
    now_cell="_last_observed_cell",
    held="_unconfirmed_errors",
)
class CostModel:
    """Estimates the costs of `arms` at the batch sizes `buckets` (ascending), for one engine.

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
        prior: CostPrior | None = None,
    ) -> None:
        self._order = CostOrder(arms)
        self._table = CostTable(arms, buckets, profile, self._order, padded=padded, prior=prior)
        self._extrapolated = self._table.extrapolated
        self.profile_id, self.prior = self._table.profile_id, self._table.prior
        shape = self._table.grid.shape
        self._is_off = np.array([arm.gamma == 0 for arm in arms])
        self._same_drafter_arms = arms_of_same_drafter(arms)
        self.use_settings(settings)
        self._features = cost_features(arms, self._table.sizes)
        self._flat_features = self._features.reshape(len(self._features), -1)
        # [arms, buckets, coefficients]: contiguous by cell.
        self._cell_features = np.ascontiguousarray(np.moveaxis(self._features, 0, -1))
        sigma, self._cell_sigma = prior_deviations(self.prior or "profile", len(self._features))
        self._process_noise = process_noise_covariance(len(sigma))
        self._weights = np.zeros(len(sigma))
        self._covariance = np.diag(sigma**2)
        self._covariance_start = float(np.trace(self._covariance))
        self._cell_correction = np.zeros(shape)
        self._cell_steps = np.zeros(shape)
        # The step at which each cell was updated last; 0: never.
        self._cell_last_step = np.zeros(shape, dtype=np.int64)
        # [buckets] error of the estimates (log seconds) found since gamma = 0 last ran there.
        self._disagreement = np.zeros(len(buckets))
        self._kv_per_sequence = self._table.kv_reference
        self._surprise = 1.0
        self._pace = 0.0
        # The cell that was updated last, and the cell of the last step.
        self._last_learnt_cell = self._last_observed_cell = (-1, -1)
        self._last_error = 0.0
        self._scatter = settings.scatter_start
        self._outliers_in_a_row = 0
        # By cell, the error of an outlier that no other step has confirmed, relative to the table.
        self._unconfirmed_errors: dict[tuple[int, int], float] = {}
        self._pending: dict[tuple[int, int], _PendingErrors] = {}
        self.rejected_steps = self.steps = 0
        self._refresh()

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps what was learnt."""
        self._settings = settings
        self._is_near = near_buckets(self._table.sizes, settings.near_batch_octaves)
        profiled_drift_max, prior_drift_max = (
            settings.cost_drift_max_profiled,
            settings.cost_drift_max_prior,
        )
        self._drift_max = math.log(profiled_drift_max if self.profile_id else prior_drift_max)

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Returns the buckets' batch sizes."""
        return self._table.sizes

    def bucket_of(self, batch_size: int) -> int:
        """Returns the index of the bucket that serves a batch size."""
        return self._table.bucket_of(batch_size)

    def predict(self, arm: int, batch_size: int, kv_tokens: int) -> float:
        """Predicts the seconds of a plain step of this arm (by index) at this batch and context."""
        factor = self._factors.item(arm, self._table.bucket_of(batch_size))
        return self._table.cell_seconds(arm, batch_size, kv_tokens) * factor

    def observe(
        self,
        cell: tuple[int, int],
        kv_per_sequence: float,
        expected_seconds: float,
        step_seconds: float,
    ) -> bool:
        """Adds one plain step (the caller omits distorted ones); False if it is rejected for now.

        cell: arm (by index) and bucket.  kv_per_sequence: mean context of its sequences, in tokens.
        expected_seconds: the result of `predict` for it.
        """
        self._kv_per_sequence += self._settings.kv_rate * (kv_per_sequence - self._kv_per_sequence)
        error, steps = self._confirmed_error(cell, math.log(step_seconds / expected_seconds))
        if steps == 0:
            return False
        self.steps += steps
        if self.steps > steps:
            # Differences between successive steps: the machine's pace cancels out.
            difference = min(abs(error - self._last_error) / _SQRT_2, 0.5)
            excess_scatter = difference - self._scatter
            scatter = self._scatter + self._settings.scatter_rate * excess_scatter
            self._scatter = max(self._settings.scatter_min, scatter)
        self._last_error = error
        self._last_observed_cell = cell
        pending = self._pending.get(cell)
        if pending is None:
            pending = self._pending[cell] = _PendingErrors()
        # Relative to the table: the correction may have moved before this is learnt.
        pending.error_sum += steps * (error + self._correction.item(cell))
        pending.steps += steps
        return True

    def _confirmed_error(self, cell: tuple[int, int], error: float) -> tuple[float, int]:
        """Returns the error to learn from, and its number of steps; 0 steps if there is none yet.

        error: of this step.  A single outlier is not used; two outliers of a cell give the smaller
        error.  A known cell needs more, unless it is faster and was not measured for long.
        """
        unconfirmed = self._unconfirmed_errors.pop(cell, None)
        limit = max(self._settings.outlier_min, self._settings.outlier_deviations * self._scatter)
        is_uninformed = self.steps == 0 and self.prior == "generic"
        if -self._settings.speedup_max <= error <= limit or is_uninformed:
            self._outliers_in_a_row = 0
            self.rejected_steps += unconfirmed is not None
            return error, 1
        self._outliers_in_a_row += 1
        if self._outliers_in_a_row >= self._settings.outliers_accepted:
            return error, 1
        is_recent = error > 0 or self._idle(cell) < self._settings.stale_steps
        if is_recent and self._evidence(cell) >= self._settings.trusted_cell_steps:
            self.rejected_steps += 1
            return 0.0, 0
        if (
            unconfirmed is not None
            and (earlier_error := unconfirmed - self._correction.item(cell)) * error > 0
        ):
            return min(earlier_error, error, key=abs), 2
        self.rejected_steps += unconfirmed is not None
        self._unconfirmed_errors[cell] = error + self._correction.item(cell)
        return 0.0, 0

    def commit(self) -> None:
        """Updates the coefficients and cells from the steps observed since the last call."""
        # An update of many steps costs no more than of one, so a well-known cell waits for more of
        # them, but only while it keeps running: later steps would belong to another pace.
        ready_cells = [
            cell for cell, pending in self._pending.items()
            if cell != self._last_observed_cell or pending.steps >= self._settings.steps_per_update
            or self._cell_steps.item(cell) < self._settings.known_cell_steps
        ]  # fmt: skip
        for i, j in ready_cells:
            pending = self._pending.pop((i, j))
            mean_error = pending.error_sum / pending.steps
            predicted_error = float(
                self._cell_features[i, j] @ self._weights
            ) + self._cell_correction.item(i, j)
            self._update_cell(i, j, mean_error - predicted_error, pending.steps)
        if ready_cells:
            self._refresh()
            self._restore_order()

    def _update_cell(self, i: int, j: int, error: float, steps: int) -> None:
        settings = self._settings
        phi, covariance = self._cell_features[i, j], self._covariance
        prior, noise = self._variances()
        is_extrapolated = self._extrapolated.item(i, j)
        if is_extrapolated:
            # The error there is due to the extrapolation or the machine's pace, not to the arm.
            phi = np.eye(1, len(phi))[0]
            prior = max(prior, settings.extrapolated_deviation**2)
        evidence = self._evidence((i, j))
        is_new = evidence == 0
        is_old = error < -settings.leap_min and self._idle((i, j)) >= settings.stale_steps
        if is_old:
            # A new measurement shows that it is not as slow as it once was.
            evidence = 0.0
        cell_uncertainty = cell_variance(prior, noise, evidence)
        noise /= steps
        is_same_cell = (i, j) == self._last_learnt_cell
        if is_same_cell:
            # Only the time has changed: an error beyond scatter is the machine's pace.
            self._observe_pace(error * error - cell_uncertainty - noise)
        self._last_learnt_cell = (i, j)
        covariance += steps * self._process_noise
        covariance[0, 0] += self._pace
        spread = covariance @ phi
        total_variance = float(phi @ spread) + cell_uncertainty + noise
        min_change = settings.change_min if is_same_cell else settings.leap_min
        is_known = is_same_cell or evidence >= settings.trusted_cell_steps
        is_forgotten = is_old and not is_extrapolated and self._is_forgotten(i)
        if (is_known or is_forgotten) and abs(error) > max(
            settings.change_deviations * math.sqrt(total_variance), min_change
        ):
            # The machine's coefficient, or that of a drafter that has not run for long.
            coefficient = 2 + int(phi[2:].argmax()) if is_forgotten else 0
            covariance[coefficient, coefficient] += error * error
            if is_known and not is_same_cell:
                # If this repeats whenever the arm runs, the arm is the cause.
                cell_uncertainty += (settings.leap_share * error) ** 2
                evidence /= 2
            spread = covariance @ phi
            total_variance = float(phi @ spread) + cell_uncertainty + noise
        if self._is_off[i]:
            self._disagreement[j] = 0.0
        elif abs(error) > max(
            settings.change_deviations * math.sqrt(cell_uncertainty + noise), settings.change_min
        ):
            # Either the machine has changed or the estimates are wrong: gamma = 0 shows which.
            self._disagreement[j] += abs(error)
        if is_new and self.steps > steps and not is_extrapolated:
            covariance *= self._variance_growth(error * error / total_variance)
            spread = covariance @ phi
            total_variance = float(phi @ spread) + cell_uncertainty + noise
        gain = spread / total_variance
        self._weights += gain * error
        # Exactly symmetric: growth of the covariance would amplify any asymmetry to negative
        # variances.
        covariance -= spread[:, None] * spread / total_variance
        residual = error * (1 - float(phi @ gain))
        min_rate = min(1.0, settings.cell_rate_min * steps)
        rate = max(cell_uncertainty / (cell_uncertainty + noise), min_rate)
        self._cell_steps[i, j] = evidence + steps
        self._cell_last_step[i, j] = self.steps
        self._correct_cells(i, j, rate * residual)

    def _observe_pace(self, excess_variance: float) -> None:
        """Learns the variation of the machine's pace from an error's square beyond scatter."""
        variation = min(max(excess_variance, 0.0), self._settings.pace_variation_max**2)
        self._pace += self._settings.pace_rate * (variation - self._pace)

    def _correct_cells(self, i: int, j: int, correction: float) -> None:
        """Adds a correction to a cell, and a share of it to its neighbours in B."""
        is_extrapolated = self._extrapolated.item(i, j)
        near_share = self._settings.neighbour_share
        for k, share in ((j - 1, near_share), (j, 1.0), (j + 1, near_share)):
            if (
                0 <= k < len(self._disagreement)
                and self._extrapolated.item(i, k) >= is_extrapolated
            ):
                corrected = self._cell_correction.item(i, k) + share * correction
                self._cell_correction[i, k] = min(self._drift_max, max(-self._drift_max, corrected))

    def _evidence(self, cell: tuple[int, int]) -> float:
        """Returns a cell's evidence in steps, faded by the steps since it was updated."""
        memory_steps = self._settings.cell_idle_steps
        return self._cell_steps.item(cell) * math.exp(-self._idle(cell) / memory_steps)

    def _idle(self, cell: tuple[int, int]) -> int:
        """Returns the steps since a cell was updated."""
        return self.steps - self._cell_last_step.item(cell)

    def _is_forgotten(self, arm: int) -> bool:
        """Returns whether the arm's drafter has drafted, but not for `stale_steps`."""
        last_step = self._cell_last_step[self._same_drafter_arms[arm]].max(initial=0)
        return bool(0 < last_step <= self.steps - self._settings.stale_steps)

    def _variance_growth(self, surprise: float) -> float:
        """Returns the factor on the covariance after the first steps of a cell.

        surprise: their squared error, over the variance that was expected.
        """
        bounded_surprise = min(max(surprise, 0.0), self._settings.surprise_max)
        self._surprise += self._settings.surprise_rate * (bounded_surprise - self._surprise)
        if bounded_surprise <= self._settings.surprise_usual:
            return 1.0
        # The table's error exceeds its uncertainty: trust it less.
        variance_ratio = self._covariance_start / float(np.trace(self._covariance))
        max_growth = self._settings.doubt_growth_max * variance_ratio
        return max(1.0, min(bounded_surprise / 2, max_growth))

    def _variances(self) -> tuple[float, float]:
        """Returns the prior variance of a single cell's correction, and the variance of a step."""
        return self._cell_sigma**2 * max(1.0, self._surprise), (1.25 * self._scatter) ** 2

    def _restore_order(self) -> None:
        """Moves cells so that more work costs no less, at the present context."""
        seconds = self._table.seconds(self._kv_per_sequence) * self._factors
        if self._order.is_ordered(seconds):
            return
        previous_correction, correction_change = (
            self._cell_correction,
            np.log(self._order.restore_order(seconds, self._cell_last_step) / seconds),
        )
        # Without the bound the next step nearby would reverse the change, and coefficients diverge.
        self._cell_correction = np.clip(
            previous_correction + correction_change, -self._drift_max, self._drift_max
        )
        correction_change = self._cell_correction - previous_correction
        self._cell_steps[np.abs(correction_change) > self._settings.disagreement_max] = 0.0
        if self._is_off.any():
            self._disagreement += np.abs(correction_change[self._is_off]).max(axis=0)
        self._refresh()

    def _refresh(self) -> None:
        shared_drift = (self._weights @ self._flat_features).reshape(self._cell_correction.shape)
        # Only the drift between arms affects a choice.  It is bounded; the machine's drift is not.
        machine_drift = shared_drift.min(axis=0)
        bounded = np.minimum(shared_drift - machine_drift, 2 * self._drift_max) + machine_drift
        self._correction = bounded + self._cell_correction
        self._factors: NDArray[np.float64] = np.exp(self._correction)
        # [buckets], see `is_new`.
        self._bucket_is_new: list[bool] | None = None

    def is_new(self, bucket: int) -> bool:
        """Returns whether fewer than two plain steps of any arm were observed in a bucket."""
        if self._bucket_is_new is None:
            steps = self._cell_steps.sum(axis=0)
            self._bucket_is_new = (steps < self._settings.new_bucket_steps).tolist()
        return self._bucket_is_new[bucket]

    def is_known(self, cell: tuple[int, int]) -> bool:
        """Returns whether enough plain steps were observed in a cell: arm (by index) and bucket."""
        return bool(self._cell_steps.item(cell) >= self._settings.trusted_cell_steps)

    def drift(self) -> NDArray[np.float64]:
        """Returns [arms, buckets], the factors of live steps on the table; 1 = unchanged."""
        return self._factors

    def costs(self, kv_tokens_per_sequence: float | NDArray[np.float64]) -> Costs:
        """Returns the costs at the buckets' batch sizes.

        kv_tokens_per_sequence: mean context length, of all batches or [buckets].
        """
        # The costs must be in order at this context, not only at the context of past steps.
        seconds = self._table.seconds(kv_tokens_per_sequence) * self._factors
        has_one_context = not isinstance(kv_tokens_per_sequence, np.ndarray)
        return Costs(
            self._order.lower_to_order(seconds, over_batches=has_one_context), self._extrapolated
        )

    def uncertainty(self) -> CostUncertainty:
        """Returns the present uncertainty of the costs, as a copy."""
        return CostUncertainty(
            self._features,
            self._covariance.copy(),
            self._cell_steps.copy(),
            self._cell_last_step.copy(),
            self.steps,
            *self._variances(),
            self._disagreement.copy(),
            self._is_near,
            self._order,
            self._settings,
            bool(self.prior),
            self._factors,
        )
