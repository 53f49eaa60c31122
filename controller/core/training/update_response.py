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

_ETA = (0.003, 0.01, 0.03, 0.1)
_DELTA = (0.0, 0.0003, 0.001, 0.004, 0.016)
# In the paper strides settle near 1 / (1 + S / 10): the corresponding logarithm of eta / delta, and
# its standard deviation.
_SETTLES = (2.3, 0.8)
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
_ANEW = 5e-5
# Standard deviation between blocks of the same state, in addition to the binomial noise.
_BLOCK_DEVIATION = 0.02
# Standard deviations of optimism.
_HOPE = 1.5
# A shift of traffic is detected if standardised errors, summed with this decay, exceed this bound.
# Then the standard deviation of the base's change.
_ERROR_KEEPS = 0.75
_ERROR_BOUND = 6.5
_SHIFT_DEVIATION = 0.15
# Drafts after which the shape has lost two thirds of its evidence; the weight of the prior, in
# drafts, that a position's acceptance equals the first one's.
_SHAPE_MEMORY = 30_000.0
_SHAPE_PRIOR = 50.0
# The bounds of every forecast of acceptance.
_BOUNDS = (1e-3, 0.999)
# Points of the horizon for which a forecast is made.
POINTS = 4


@dataclass(frozen=True, slots=True)
class Forecast:
    """Holds a forecast of first-position acceptance.

    now: its present value.  mean: [strides, POINTS] over the horizon.  hopeful: the same if each
    stride's gain over the present one is `_HOPE` standard deviations larger.  testable: the same,
    for the part that a trial would show.  gain, deviation: of the largest achievable gain.
    """

    now: float
    mean: NDArray[np.float64]
    hopeful: NDArray[np.float64]
    testable: NDArray[np.float64]
    gain: float
    deviation: float


@recorded(
    "update_response",
    "updates shifts _accepted _covariance _error _landed _log_evidence _mean _reached "
    "_resets_per_round _rounds _seen _shape _since_first_reset _state",
)
class UpdateResponse:
    """Holds the estimate for one drafter; `fold` changes it."""

    def __init__(self) -> None:
        eta, delta = np.meshgrid(_ETA, _DELTA, indexing="ij")
        self._eta: NDArray[np.float64] = eta.ravel()
        self._delta: NDArray[np.float64] = delta.ravel()
        count = self._eta.size
        self._state = np.zeros(count)
        drifts = self._delta > 0
        ratio = np.log(self._eta / np.where(drifts, self._delta, 1.0))
        likely = -0.5 * np.square((ratio - _SETTLES[0]) / _SETTLES[1])
        self._log_prior = np.where(drifts, likely, _LOG_NO_DRIFT)
        # The log-likelihood of each grid point, from the observations.
        self._log_evidence = np.zeros(count)
        # Of (base, gain): means [2], and covariances bb, bg, gg [3], on every grid point.
        self._mean = np.tile(np.array(_PRIOR_MEAN)[:, None], count)
        bb, gg = np.square(_PRIOR_DEVIATION)
        bg = -_GAIN_OF_MISSING * bb
        gg += _GAIN_OF_MISSING**2 * bb
        self._covariance = np.tile(np.array([bb, bg, gg])[:, None], count)
        self._rounds = self._landed = 0
        # Rounds since the first reset, 0 before it.
        self._since_first_reset = 0
        self._resets_per_round = 0.0
        # Of the open block: reached drafts, the same in equivalents of first positions, accepted.
        self._reached = self._seen = self._accepted = 0.0
        # By position, with a long memory: drafts that were reached, and accepted.
        self._shape = np.zeros((2, MAX_GAMMA))
        self._error = 0.0
        self.updates = self.shifts = 0

    @property
    def is_reset_repeatedly(self) -> bool:
        """Whether the drafter is reset repeatedly, so that steps without updates are observed."""
        return self._resets_per_round > _ANEW

    def fold(self, report: StepReport, *, drafted: bool) -> None:
        """Adds a report.  drafted: the counts belong to the drafter that is updated."""
        self._count_resets(report)
        if report.flags.drafter_reset:
            self._close()
            self._state = np.zeros_like(self._state)
            self._covariance[0] += _REQUEST_DEVIATION**2
        self._rounds += 1
        if report.update_seconds:
            self._landed += 1
            self.updates += 1
        if drafted and report.gamma:
            self._count(report)
        if self._rounds >= _BLOCK_ROUNDS:
            self._close()

    def forecast(
        self,
        updates_per_round: Sequence[float],
        horizon_rounds: float,
        present: int,
        trial_updates: float = math.inf,
    ) -> Forecast:
        """Forecasts for each number of updates per round.  present: index of the present one.

        trial_updates: number of updates that a trial can afford.
        """
        weight = self._weights()
        base, gain = self._base_and_gain()
        ahead = horizon_rounds * (np.arange(POINTS) + 0.5) / POINTS
        learning = np.asarray(updates_per_round)[:, None] * self._eta
        # A reset loses all progress, so resets add to the mean drift.
        rate = learning + self._delta + self._resets_per_round
        settled = np.divide(learning, rate, out=np.zeros_like(rate), where=rate > 0)
        left = np.exp(-rate[:, None, :] * ahead[None, :, None])
        state = settled[:, None, :] + (self._state - settled)[:, None, :] * left
        plain = (base + gain * state) @ weight
        # The variance of the difference between each of them and the present one.
        apart = state - state[present]
        most = np.square(_DEVIATION_OF_MISSING * (1 - np.clip(base, 0.0, 1.0)))
        unsure = np.clip(self._covariance[2], 0.0, most)
        expected = (gain * apart) @ weight
        parts = np.square(gain * apart - expected[..., None]) + unsure * np.square(apart)
        hope = plain + _HOPE * np.sqrt(parts @ weight)
        shown = self._shown(unsure + np.square(gain - weight @ gain), trial_updates)
        # Without updates a trial does not have to make progress first.
        shown = np.where(learning > 0, shown, 1.0)
        testable = plain + _HOPE * np.sqrt((parts * shown[:, None, :]) @ weight)
        mean_gain = float(weight @ gain)
        spread = float(weight @ (self._covariance[2] + np.square(gain - mean_gain)))
        now = float(np.clip(weight @ (base + gain * self._state), *_BOUNDS))
        plain, hope, testable = (np.clip(one, *_BOUNDS) for one in (plain, hope, testable))
        return Forecast(now, plain, hope, testable, mean_gain, float(np.sqrt(spread)))

    def _shown(self, variance: NDArray[np.float64], updates: float) -> NDArray[np.float64]:
        """Returns the share of the gain's variance that this many further updates would show."""
        reached = 1 - (1 - self._state) * (1 - self._eta) ** updates
        seen = np.square(reached) * variance
        return seen / (seen + _REQUEST_DEVIATION**2)

    def _weights(self) -> NDArray[np.float64]:
        log_weight = self._log_prior + self._log_evidence
        weight: NDArray[np.float64] = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        return weight

    def _base_and_gain(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the means.  No gain is below 0, as updates that lower acceptance are reverted."""
        (base, gain), (_, bg, gg) = self._mean, self._covariance
        return base - np.minimum(gain, 0.0) * bg / gg, np.maximum(gain, 0.0)

    def _close(self) -> None:
        """Adds the open block as one observation, and advances the states."""
        rounds = self._rounds
        if not rounds:
            return
        before = self._state
        learnt = 1 - (1 - before) * (1 - self._eta) ** self._landed
        self._state = learnt * (1 - self._delta) ** rounds
        if self._seen:
            self._observe((before + self._state) / 2)
        self._rounds = self._landed = 0
        self._reached = self._seen = self._accepted = 0.0

    def _count_resets(self, report: StepReport) -> None:
        """Updates the rate of resets; a single reset, as after a rollback, gives no rate."""
        if self._since_first_reset:
            self._resets_per_round += (report.flags.drafter_reset - self._resets_per_round) * max(
                _RESET_RATE, 1 / self._since_first_reset
            )
        if self._since_first_reset or report.flags.drafter_reset:
            self._since_first_reset += 1

    def _count(self, report: StepReport) -> None:
        exact, censored = report.drafted
        counts, gamma = np.array(exact), report.gamma
        unknown = np.array(censored) if len(censored) else np.zeros(gamma, dtype=np.int64)
        counts[:gamma] += unknown
        # Sequences that accepted k drafts or more, k = 0..gamma.
        left = counts[::-1].cumsum()[::-1]
        reached, accepted = left[:-1] - unknown, left[1:]
        self._shape *= np.exp(-reached[0] / _SHAPE_MEMORY)
        self._shape[0, :gamma] += reached
        self._shape[1, :gamma] += accepted
        all_reached, all_accepted = self._shape[:, :gamma]
        first = (all_accepted[0] + 0.5) / (all_reached[0] + 1)
        usual = (all_accepted + _SHAPE_PRIOR * first) / (all_reached + _SHAPE_PRIOR)
        self._reached += float(reached.sum())
        self._seen += float(reached @ (usual / usual[0]))
        self._accepted += float(accepted.sum())

    def _observe(self, state: NDArray[np.float64]) -> None:
        found = self._accepted / self._seen
        # The binomial noise of a count, with a prior so that it is never 0.
        likely = (self._accepted + 1) / (self._reached + 2)
        noise = likely * (1 - likely) * self._reached / self._seen**2 + _BLOCK_DEVIATION**2
        bb, bg, gg = self._covariance
        bb = bb + self._rounds * _PROCESS_NOISE[0] ** 2
        gg = gg + self._rounds * _PROCESS_NOISE[1] ** 2
        base, gain = self._mean
        off = found - (base + gain * state)
        with_base, with_gain = bb + bg * state, bg + gg * state
        spread = noise + with_base + with_gain * state
        for_base, for_gain = with_base / spread, with_gain / spread
        self._mean = np.stack([base + for_base * off, gain + for_gain * off])
        self._covariance = np.stack(
            [bb - for_base * with_base, bg - for_base * with_gain, gg - for_gain * with_gain]
        )
        error = float(self._weights() @ (off / np.sqrt(spread)))
        self._log_evidence *= np.exp(-self._rounds / _GRID_MEMORY_ROUNDS)
        self._log_evidence -= 0.5 * (np.log(spread) + off * off / spread)
        self._log_evidence -= self._log_evidence.max()
        self._error = _ERROR_KEEPS * self._error + error
        if abs(self._error) > _ERROR_BOUND:
            self._shift()

    def _shift(self) -> None:
        """Handles a shift: the base becomes uncertain, and z is reset if acceptance has fallen."""
        if self._error < 0:
            self._state = np.zeros_like(self._state)
        self._covariance[0] += _SHIFT_DEVIATION**2
        self._error = 0.0
        self.shifts += 1
