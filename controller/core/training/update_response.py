"""Estimates how online updates change a drafter's acceptance: learning against drift.

The state z in [0, 1] is the drafter's progress from its first weights (0) to the best that updates
can achieve (1).  An update that lands closes a share `eta` of the remaining gap, and in every round
(a decode step) a share `delta` of the progress is lost, because the text changes:

    z <- z + eta (1 - z)   for an update        z <- (1 - delta) z   for a round
    a_1 = base + gain * z

a_1 is the acceptance of the first draft position, which every draft shows, whatever its length.
Later positions count as evidence about a_1 through their usual ratio to it: a_k = shape_k a_1.
At a fixed stride S the state settles at 1 / (1 + S delta / eta), which matches the acceptance
lengths over strides in the paper on test-time speculation (arXiv:2605.09329, Table 7).

eta and delta are unknown.  A grid of values is tracked in parallel, each point with its own z, its
own Kalman filter for base and gain, and a weight for its past predictions.  The base changes faster
than the gain, as requests differ: only changes that follow z are attributed to the gain.

A trial of a few updates shows a gain only as far as it changes z: if it brings z to r, the
expectation of a gain with deviation s moves by k s,  k^2 = (r s)^2 / ((r s)^2 + n^2),  where n is
the deviation between requests (the knowledge gradient of Frazier, Powell and Dayanik, 2008).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

_ETA_GRID = (0.003, 0.01, 0.03, 0.1)
_DELTA_GRID = (0.0, 0.0003, 0.001, 0.004, 0.016)
# In the paper strides settle near 1 / (1 + S / 10): the corresponding logarithm of eta / delta, and
# its standard deviation.
_SETTLING_PRIOR = (2.3, 0.8)
# The log prior of no drift at all: as likely as one deviation off.
_LOG_NO_DRIFT = -0.5
# Prior of (base, gain): means and standard deviations, and the process noise of a round.  A drafter
# with low acceptance has more to gain: the expected gain grows by this share of the base's distance
# below its mean.  The deviation of the gain is at most that share of 1 - base.
_PRIOR_MEAN = (0.7, 0.08)
_PRIOR_DEVIATION = (0.3, 0.1)
_GAIN_OF_MISSING = 0.3
_DEVIATION_OF_MISSING = 0.25
_PROCESS_NOISE = (3e-4, 2e-4)
# Rounds that form one observation.
_BLOCK_ROUNDS = 16
# Rounds after which the evidence for an eta and a delta has faded to a third.
_GRID_MEMORY_ROUNDS = 50_000.0
# Standard deviation of the base between requests.
_REQUEST_DEVIATION = 0.03
# Learning rate per round of the mean rate of resets.
_RESET_RATE = 1e-4
# Resets per round above which they count as repeated.
_REPEATED_RESETS_PER_ROUND = 5e-5
# Standard deviation between blocks of the same state, in addition to the binomial noise.
_BLOCK_DEVIATION = 0.02
# Standard deviations of optimism.
_OPTIMISM_DEVIATIONS = 1.5
# A shift of traffic is detected if standardised errors, summed with this decay, exceed this bound.
# Then the standard deviation of the base's change.
_ERROR_DECAY = 0.75
_ERROR_BOUND = 6.5
_SHIFT_DEVIATION = 0.15
# Drafts after which the shape has lost two thirds of its evidence; the weight of the prior, in
# drafts, that a position's acceptance equals the first one's.
_SHAPE_MEMORY_DRAFTS = 30_000.0
_SHAPE_PRIOR_DRAFTS = 50.0
# The bounds of every forecast of acceptance.
_ACCEPTANCE_BOUNDS = (1e-3, 0.999)
# Points of the horizon for which a forecast is made.
FORECAST_POINTS = 4


@dataclass(frozen=True, slots=True)
class Forecast:
    """Holds a forecast of first-position acceptance.

    current: its present value.  mean: [strides, POINTS] over the horizon.  optimistic: the same if
    each stride's gain over the present one is `_OPTIMISM_DEVIATIONS` standard deviations larger.
    testable: the same, for the part that a trial would show.  gain, gain_deviation: of the largest
    achievable gain.
    """

    current: float
    mean: NDArray[np.float64]
    optimistic: NDArray[np.float64]
    testable: NDArray[np.float64]
    gain: float
    gain_deviation: float


@recorded(
    "update_response",
    "updates shifts _covariance _error _log_evidence _mean _resets_per_round _rounds _shape "
    "_since_first_reset",
    accepted="_accepted_drafts",
    landed="_landed_updates",
    reached="_reached_drafts",
    seen="_first_position_equivalents",
    state="_progress",
)
class UpdateResponse:
    """Holds the estimate for one drafter; `observe` changes it."""

    def __init__(self) -> None:
        eta, delta = np.meshgrid(_ETA_GRID, _DELTA_GRID, indexing="ij")
        self._eta: NDArray[np.float64] = eta.ravel()
        self._delta: NDArray[np.float64] = delta.ravel()
        count = self._eta.size
        self._progress = np.zeros(count)
        has_drift = self._delta > 0
        log_ratio = np.log(self._eta / np.where(has_drift, self._delta, 1.0))
        log_likelihood = -0.5 * np.square((log_ratio - _SETTLING_PRIOR[0]) / _SETTLING_PRIOR[1])
        self._log_prior = np.where(has_drift, log_likelihood, _LOG_NO_DRIFT)
        # The log-likelihood of each grid point, from the observations.
        self._log_evidence = np.zeros(count)
        # Of (base, gain): means [2], and covariances bb, bg, gg [3], on every grid point.
        self._mean = np.tile(np.array(_PRIOR_MEAN)[:, None], count)
        bb, gg = np.square(_PRIOR_DEVIATION)
        bg = -_GAIN_OF_MISSING * bb
        gg += _GAIN_OF_MISSING**2 * bb
        self._covariance = np.tile(np.array([bb, bg, gg])[:, None], count)
        self._rounds = self._landed_updates = 0
        # Rounds since the first reset, 0 before it.
        self._since_first_reset = 0
        self._resets_per_round = 0.0
        # Of the open block: reached drafts, the same in equivalents of first positions, accepted.
        self._reached_drafts = self._first_position_equivalents = self._accepted_drafts = 0.0
        # By position, with a long memory: drafts that were reached, and accepted.
        self._shape = np.zeros((2, MAX_GAMMA))
        self._error = 0.0
        self.updates = self.shifts = 0

    @property
    def is_reset_repeatedly(self) -> bool:
        """Whether the drafter is reset repeatedly, so that steps without updates are observed."""
        return self._resets_per_round > _REPEATED_RESETS_PER_ROUND

    def observe(self, report: StepReport, *, is_learner_step: bool) -> None:
        """Adds a report.  is_learner_step: the counts belong to the drafter that is updated."""
        self._count_resets(report)
        if report.flags.drafter_reset:
            self._close_block()
            self._progress = np.zeros_like(self._progress)
            self._covariance[0] += _REQUEST_DEVIATION**2
        self._rounds += 1
        if report.update_seconds:
            self._landed_updates += 1
            self.updates += 1
        if is_learner_step and report.gamma:
            self._count_drafts(report)
        if self._rounds >= _BLOCK_ROUNDS:
            self._close_block()

    def forecast(
        self,
        updates_per_round: Sequence[float],
        horizon_rounds: float,
        current_index: int,
        trial_updates: float = math.inf,
    ) -> Forecast:
        """Forecasts for each number of updates per round.  current_index: index of the present one.

        trial_updates: number of updates that a trial can afford.
        """
        weight = self._grid_weights()
        base, gain = self._base_and_gain()
        rounds_ahead = horizon_rounds * (np.arange(FORECAST_POINTS) + 0.5) / FORECAST_POINTS
        learning_rate = np.asarray(updates_per_round)[:, None] * self._eta
        # A reset loses all progress, so resets add to the mean drift.
        decay_rate = learning_rate + self._delta + self._resets_per_round
        settled_progress = np.divide(
            learning_rate, decay_rate, out=np.zeros_like(decay_rate), where=decay_rate > 0
        )
        decay = np.exp(-decay_rate[:, None, :] * rounds_ahead[None, :, None])
        progress = (
            settled_progress[:, None, :] + (self._progress - settled_progress)[:, None, :] * decay
        )
        mean = (base + gain * progress) @ weight
        # The variance of the difference between each of them and the present one.
        progress_difference = progress - progress[current_index]
        max_variance = np.square(_DEVIATION_OF_MISSING * (1 - np.clip(base, 0.0, 1.0)))
        gain_variance = np.clip(self._covariance[2], 0.0, max_variance)
        expected_difference = (gain * progress_difference) @ weight
        variance_parts = np.square(
            gain * progress_difference - expected_difference[..., None]
        ) + gain_variance * np.square(progress_difference)
        optimistic = mean + _OPTIMISM_DEVIATIONS * np.sqrt(variance_parts @ weight)
        testable_share = self._testable_share(
            gain_variance + np.square(gain - weight @ gain), trial_updates
        )
        # Without updates a trial does not have to make progress first.
        testable_share = np.where(learning_rate > 0, testable_share, 1.0)
        testable = mean + _OPTIMISM_DEVIATIONS * np.sqrt(
            (variance_parts * testable_share[:, None, :]) @ weight
        )
        mean_gain = float(weight @ gain)
        total_gain_variance = float(weight @ (self._covariance[2] + np.square(gain - mean_gain)))
        current = float(np.clip(weight @ (base + gain * self._progress), *_ACCEPTANCE_BOUNDS))
        mean, optimistic, testable = (
            np.clip(forecast_part, *_ACCEPTANCE_BOUNDS)
            for forecast_part in (mean, optimistic, testable)
        )
        return Forecast(
            current, mean, optimistic, testable, mean_gain, float(np.sqrt(total_gain_variance))
        )

    def _testable_share(self, variance: NDArray[np.float64], updates: float) -> NDArray[np.float64]:
        """Returns the share of the gain's variance that this many further updates would show."""
        progress = 1 - (1 - self._progress) * (1 - self._eta) ** updates
        signal_variance = np.square(progress) * variance
        return signal_variance / (signal_variance + _REQUEST_DEVIATION**2)

    def _grid_weights(self) -> NDArray[np.float64]:
        log_weight = self._log_prior + self._log_evidence
        weight: NDArray[np.float64] = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        return weight

    def _base_and_gain(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the means.  No gain is below 0, as updates that lower acceptance are reverted."""
        (base, gain), (_, bg, gg) = self._mean, self._covariance
        return base - np.minimum(gain, 0.0) * bg / gg, np.maximum(gain, 0.0)

    def _close_block(self) -> None:
        """Adds the open block as one observation, and advances the states."""
        rounds = self._rounds
        if not rounds:
            return
        previous_progress = self._progress
        updated_progress = 1 - (1 - previous_progress) * (1 - self._eta) ** self._landed_updates
        self._progress = updated_progress * (1 - self._delta) ** rounds
        if self._first_position_equivalents:
            self._update_filter((previous_progress + self._progress) / 2)
        self._rounds = self._landed_updates = 0
        self._reached_drafts = self._first_position_equivalents = self._accepted_drafts = 0.0

    def _count_resets(self, report: StepReport) -> None:
        """Updates the rate of resets; a single reset, as after a rollback, gives no rate."""
        if self._since_first_reset:
            self._resets_per_round += (report.flags.drafter_reset - self._resets_per_round) * max(
                _RESET_RATE, 1 / self._since_first_reset
            )
        if self._since_first_reset or report.flags.drafter_reset:
            self._since_first_reset += 1

    def _count_drafts(self, report: StepReport) -> None:
        accepted_counts, censored = report.drafted_counts
        counts, gamma = np.array(accepted_counts), report.gamma
        censored_counts = np.array(censored) if len(censored) else np.zeros(gamma, dtype=np.int64)
        counts[:gamma] += censored_counts
        # Sequences that accepted k drafts or more, k = 0..gamma.
        survivors = counts[::-1].cumsum()[::-1]
        reached, accepted = survivors[:-1] - censored_counts, survivors[1:]
        self._shape *= np.exp(-reached[0] / _SHAPE_MEMORY_DRAFTS)
        self._shape[0, :gamma] += reached
        self._shape[1, :gamma] += accepted
        all_reached, all_accepted = self._shape[:, :gamma]
        first_acceptance = (all_accepted[0] + 0.5) / (all_reached[0] + 1)
        usual_acceptance = (all_accepted + _SHAPE_PRIOR_DRAFTS * first_acceptance) / (
            all_reached + _SHAPE_PRIOR_DRAFTS
        )
        self._reached_drafts += float(reached.sum())
        self._first_position_equivalents += float(
            reached @ (usual_acceptance / usual_acceptance[0])
        )
        self._accepted_drafts += float(accepted.sum())

    def _update_filter(self, progress: NDArray[np.float64]) -> None:
        acceptance = self._accepted_drafts / self._first_position_equivalents
        # The binomial noise of a count, with a prior so that it is never 0.
        smoothed_acceptance = (self._accepted_drafts + 1) / (self._reached_drafts + 2)
        noise = (
            smoothed_acceptance
            * (1 - smoothed_acceptance)
            * self._reached_drafts
            / self._first_position_equivalents**2
            + _BLOCK_DEVIATION**2
        )
        bb, bg, gg = self._covariance
        bb = bb + self._rounds * _PROCESS_NOISE[0] ** 2
        gg = gg + self._rounds * _PROCESS_NOISE[1] ** 2
        base, gain = self._mean
        residual = acceptance - (base + gain * progress)
        base_covariance, gain_covariance = bb + bg * progress, bg + gg * progress
        residual_variance = noise + base_covariance + gain_covariance * progress
        base_kalman_gain, gain_kalman_gain = (
            base_covariance / residual_variance,
            gain_covariance / residual_variance,
        )
        self._mean = np.stack(
            [base + base_kalman_gain * residual, gain + gain_kalman_gain * residual]
        )
        self._covariance = np.stack(
            [
                bb - base_kalman_gain * base_covariance,
                bg - base_kalman_gain * gain_covariance,
                gg - gain_kalman_gain * gain_covariance,
            ]
        )
        standardised_error = float(self._grid_weights() @ (residual / np.sqrt(residual_variance)))
        self._log_evidence *= np.exp(-self._rounds / _GRID_MEMORY_ROUNDS)
        self._log_evidence -= 0.5 * (
            np.log(residual_variance) + residual * residual / residual_variance
        )
        self._log_evidence -= self._log_evidence.max()
        self._error = _ERROR_DECAY * self._error + standardised_error
        if abs(self._error) > _ERROR_BOUND:
            self._handle_shift()

    def _handle_shift(self) -> None:
        """Handles a shift: the base becomes uncertain, and z is reset if acceptance has fallen."""
        if self._error < 0:
            self._progress = np.zeros_like(self._progress)
        self._covariance[0] += _SHIFT_DEVIATION**2
        self._error = 0.0
        self.shifts += 1
