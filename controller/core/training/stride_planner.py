"""Chooses how often a drafter is updated while it serves: the stride S, or off.

For each S, the batch's tokens per second over the horizon are estimated as

    V(S) = mean over the horizon of  max over arms  B (1 + E[accepted | a_1(t, S)]) / (C + price(S))

with acceptance as forecast by `update_response`, the price as measured by `UpdatePrice`, and
gamma = 0 among the arms.  The best S is chosen if it exceeds the present one by a margin; updates
must also exceed off, which is free, by a margin.  If another S might be better (the gain is
uncertain), and the updates that a trial can afford would show it, it is tried, within a small
budget for expected losses; an aligned drafter or a compute-bound batch never loses more than that.
The budget is not charged before the first update has landed: a trainer may take longer to start
than the budget would last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm
from controller.core.plan import Regime, RegimeMode
from controller.core.planning.planner import Values
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport
from controller.core.training.update_response import Forecast, UpdateResponse

# Before any update was observed: the share of a step's seconds lost, and the steps beside it.
_GUESSED_STEPS_LOST = 0.5
_GUESSED_STEPS_BESIDE = 2.0
# If a step takes more than this multiple of its expected time, an update is not the only cause.
_MAX_STEPS_LOST = 3.0
_MIN_LEARNING_RATE = 0.05
# Rounds between two updates; 0 is off.  The paper's, arXiv:2605.09329, Tables 3 and 7.
STRIDES: Final = (0, 50, 20, 10, 5, 2, 1)
# The horizon of a plan in rounds.
_HORIZON_ROUNDS = 10_000.0
# Relative gain required of another stride, and of updating at all.
_SWITCH_MARGIN = 0.005
_START_MARGIN = 0.004
# Share of the optimistic gain that must be certain.
_CERTAIN_SHARE = 0.33
# Rounds between two changes: acceptance responds slowly.
_DWELL_ROUNDS = 64
# Loss budget of trials: share of all time, initial budget and maximum, in steps.
_TRIAL_SHARE = 0.005
_TRIAL_START_STEPS = 16.0
_TRIAL_MAX_STEPS = 40.0
# A trial needs this budget in steps to begin, and lasts this many rounds if it stays promising.
_TRIAL_MIN_STEPS = 8.0
_TRIAL_ROUNDS = 320
# The first stride tried from off: its settled gain is about half of the possible gain.
_FIRST_TRIAL = STRIDES.index(10)
# Upper bound of a position's forecast acceptance.
_MAX_CONDITIONAL = 0.995


@recorded("update_costs", "updates", lost="lost_seconds", beside="steps_beside")
@dataclass(slots=True)
class _UpdateCost:
    """Holds means over the updates at similar batch sizes."""

    updates: int = 0
    lost_seconds: float = 0.0
    steps_beside: float = 0.0


@recorded(
    "update_price",
    "_open_steps",
    seconds="last_update_seconds",
    paid="_costs",
    open_lost="_open_lost_seconds",
)
class UpdatePrice:
    """Estimates the seconds lost by an update, and the steps beside it; by batch size.

    An update runs beside decode steps (in another process or another stream) and slows them down:
    they contend for processors, memory bandwidth or the GPU.  Its cost is the excess of all these
    steps together over their expected seconds, from the hand-over to the landing of the update.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _UpdateCost] = {}
        self._open_lost_seconds = 0.0
        self._open_steps = 0
        self.last_update_seconds = 0.0

    def observe(self, report: StepReport, expected_seconds: float) -> float:
        """Adds a step; returns the seconds that it lost because of an update."""
        flags = report.flags
        lost_seconds = 0.0
        if flags.updating:
            self._open_steps += 1
            if not flags.has_distorted_duration:
                max_lost_seconds = _MAX_STEPS_LOST * expected_seconds
                lost_seconds = min(report.step_seconds - expected_seconds, max_lost_seconds)
                self._open_lost_seconds += lost_seconds
        if report.update_seconds:
            self.last_update_seconds = report.update_seconds
            cost = self._costs.setdefault(report.batch_size.bit_length(), _UpdateCost())
            cost.updates += 1
            learning_rate = max(_MIN_LEARNING_RATE, 1 / cost.updates)
            cost.lost_seconds += learning_rate * (self._open_lost_seconds - cost.lost_seconds)
            cost.steps_beside += learning_rate * (self._open_steps - cost.steps_beside)
            self._open_lost_seconds, self._open_steps = 0.0, 0
        return lost_seconds

    @property
    def is_known(self) -> bool:
        """Whether an update was observed."""
        return bool(self._costs)

    def lost_seconds_per_update(self, batch_size: int, step_seconds: float) -> float:
        """Returns the seconds that an update takes from the steps beside it, 0 or more."""
        cost = self._nearest_cost(batch_size)
        return _GUESSED_STEPS_LOST * step_seconds if cost is None else max(0.0, cost.lost_seconds)

    def updates_per_round(self, batch_size: int, stride: int) -> float:
        """Returns the updates per round: the stride's, limited by the duration of an update."""
        cost = self._nearest_cost(batch_size)
        steps_beside = _GUESSED_STEPS_BESIDE if cost is None else cost.steps_beside
        return 1 / max(stride, steps_beside, 1.0)

    def _nearest_cost(self, batch_size: int) -> _UpdateCost | None:
        if not self._costs:
            return None
        bits = batch_size.bit_length()
        return self._costs[min(self._costs, key=lambda candidate_bits: abs(candidate_bits - bits))]


@recorded("stride_value")
@dataclass(frozen=True, slots=True)
class StrideValue:
    """Holds the numbers by which one stride (0: off) was judged.

    first_acceptance: of the first draft position, mean over the horizon.  lost_seconds: per step.
    tokens_per_second: of the batch.  optimistic_tokens_per_second: the same, with the optimistic
    gain as far as a trial can show it.
    """

    stride: int
    first_acceptance: float
    lost_seconds: float
    tokens_per_second: float
    optimistic_tokens_per_second: float
    chosen: bool


@recorded("regime_state")
@dataclass(frozen=True, slots=True)
class StridePlannerState:
    """Holds the numbers behind the regime, for display.

    updates: landed so far.  gain, gain_deviation: the largest possible gain of first-position
    acceptance.  update_seconds: duration of the last update.  lost_seconds: by an update, over the
    steps beside it.  trying: the stride is on trial.  trial_steps: remaining loss budget of trials.
    """

    strides: tuple[StrideValue, ...]
    updates: int
    gain: float
    gain_deviation: float
    update_seconds: float
    lost_seconds: float
    trying: bool
    trial_steps: float


@recorded(
    "regime_planner",
    "state _price _response _rounds _trial_steps",
    at="_stride_index",
    moved_at="_last_change_round",
    otherwise="_baseline_index",
    trial_loss="_trial_loss_steps",
    trying="_is_trial",
)
class StridePlanner:
    """Chooses the stride for one engine.  learner: name of the drafter that can be updated."""

    def __init__(self, arms: Sequence[Arm], learner: str) -> None:
        self._learner = learner
        self._is_learner = np.array([arm.drafter == self._learner for arm in arms])
        self._gammas = np.array([arm.gamma for arm in arms])
        # Steps at gamma = 0 count as the learner's, whichever drafter they name.
        self._is_learner_or_off = self._is_learner | (self._gammas == 0)
        self._response = UpdateResponse()
        self._price = UpdatePrice()
        # Index of the present stride, and of the stride that would be chosen without a trial.
        self._stride_index = self._baseline_index = 0
        self._rounds = self._last_change_round = 0
        self._is_trial = False
        self._trial_steps = _TRIAL_START_STEPS
        # Expected loss of the trial, as a share of every step.
        self._trial_loss_steps = 0.0
        self.state: StridePlannerState | None = None

    @property
    def regime(self) -> Regime:
        """The last chosen regime."""
        return (
            Regime(RegimeMode.ONLINE, STRIDES[self._stride_index])
            if self._stride_index
            else Regime()
        )

    def observe(self, report: StepReport, expected_seconds: float) -> None:
        """Adds a report.  expected_seconds: of its step without an update beside it."""
        self._rounds += 1
        # A trainer that is still starting slows down no step.
        lost_steps = self._trial_loss_steps if self._price.is_known else 0.0
        self._trial_steps = min(self._trial_steps + _TRIAL_SHARE - lost_steps, _TRIAL_MAX_STEPS)
        self._price.observe(report, expected_seconds)
        self._response.observe(report, is_learner_step=report.drafter == self._learner)

    def update(
        self, values: Values, row: int, batch_size: int, feasible: NDArray[np.bool_] | None = None
    ) -> Regime:
        """Chooses the stride for the present batch, in its row of the plan.

        feasible: [arms], what may run there; None for all.
        """
        updates_per_round = [
            self._price.updates_per_round(batch_size, s) if s else 0.0 for s in STRIDES
        ]
        seconds = values.costs.seconds[:, row]
        cheapest_seconds = float(seconds[self._is_learner_or_off].min())
        lost_seconds_per_update = self._price.lost_seconds_per_update(batch_size, cheapest_seconds)
        trial_budget_seconds = max(self._trial_steps, 0.0) * cheapest_seconds
        forecast = self._response.forecast(
            updates_per_round,
            _HORIZON_ROUNDS,
            self._baseline_index,
            trial_budget_seconds / lost_seconds_per_update if lost_seconds_per_update else math.inf,
        )
        lost_seconds = np.array(updates_per_round) * lost_seconds_per_update
        if feasible is not None:
            seconds = np.where(feasible, seconds, np.inf)
        step_seconds = seconds[:, None] + lost_seconds
        expected_rates, optimistic_rates, testable_rates = (
            batch_size
            * self._goodput(values, row, acceptance_forecast / forecast.current, step_seconds)
            for acceptance_forecast in (forecast.mean, forecast.optimistic, forecast.testable)
        )
        self._choose_stride(
            expected_rates, optimistic_rates, testable_rates, lost_seconds / cheapest_seconds
        )
        self.state = self._make_state(
            forecast, lost_seconds, expected_rates, testable_rates, lost_seconds_per_update
        )
        return self.regime

    def _choose_stride(
        self,
        expected_rates: NDArray[np.float64],
        optimistic_rates: NDArray[np.float64],
        testable_rates: NDArray[np.float64],
        lost_steps: NDArray[np.float64],
    ) -> None:
        """Changes the stride if this one has run long enough.  lost_steps: shares of a step."""
        current, rounds_since_change = self._stride_index, self._rounds - self._last_change_round
        best = int(expected_rates[1:].argmax()) + 1
        is_established = current > 0 and not self._is_trial
        off_rate = expected_rates[0] * (1 - _START_MARGIN if is_established else 1 + _START_MARGIN)
        if not self._response.is_reset_repeatedly:
            # Off may be better than estimated, which only steps without updates would show.
            optimism = optimistic_rates - expected_rates
            off_rate += _CERTAIN_SHARE * (optimism[0] if self._baseline_index else optimism[best])
        if expected_rates[best] <= off_rate:
            best = 0
        elif current and expected_rates[best] <= expected_rates[current] * (1 + _SWITCH_MARGIN):
            best = current
        target = best
        if self._trial_steps > (0.0 if self._is_trial else _TRIAL_MIN_STEPS):
            rate_to_beat = expected_rates[best] * (1 + _SWITCH_MARGIN)
            if (
                self._is_trial
                and current
                and rounds_since_change < _TRIAL_ROUNDS
                and testable_rates[current] > rate_to_beat
            ):
                target = current
            else:
                neighbours = [i for i in (best - 1, best + 1) if 0 < i < len(STRIDES)]
                if current and self._response.updates and not self._response.is_reset_repeatedly:
                    neighbours.append(0)
                most_promising = max(
                    neighbours if best else [_FIRST_TRIAL], key=lambda i: float(testable_rates[i])
                )
                target = most_promising if testable_rates[most_promising] > rate_to_beat else best
        is_budget_spent = self._is_trial and self._trial_steps <= 0
        if target != current and (rounds_since_change >= _DWELL_ROUNDS or is_budget_spent):
            self._stride_index, self._last_change_round = target, self._rounds
            self._is_trial = target != best
        elif current == best:
            self._is_trial = False
        self._baseline_index = best if self._is_trial else self._stride_index
        # A better stride that waits for the present one's dwell time is no trial.
        self._trial_loss_steps = 0.0
        if self._is_trial:
            # In the worst case the more frequent updates gain nothing.
            worst_loss = float(lost_steps[self._stride_index] - lost_steps[best])
            self._trial_loss_steps = max(
                0.0,
                1 - float(expected_rates[self._stride_index] / expected_rates[best]),
                worst_loss,
            )

    def _goodput(
        self,
        values: Values,
        row: int,
        acceptance_factor: NDArray[np.float64],
        seconds: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Returns [strides], tokens per second of one sequence, with the best arm at each point.

        acceptance_factor: [strides, points], on each conditional acceptance.  seconds: [arms,
        strides].
        """
        conditional = np.array(values.traffic.last_batch[self._learner].conditional)
        scaled = np.minimum(conditional * acceptance_factor[..., None], _MAX_CONDITIONAL)
        expected_drafts = np.cumsum(np.cumprod(scaled, axis=-1), axis=-1)
        expected_accepted = np.concatenate(
            [np.zeros((*acceptance_factor.shape, 1)), expected_drafts], axis=-1
        )
        gamma_index = np.minimum(self._gammas, len(conditional))
        learner_accepted = np.moveaxis(expected_accepted[..., gamma_index], -1, 0)
        tokens_per_step = 1 + np.where(
            self._is_learner[:, None, None],
            learner_accepted,
            values.expected_accepted[:, row, None, None],
        )
        best_rates: NDArray[np.float64] = (
            (tokens_per_step / seconds[:, :, None]).max(axis=0).mean(axis=-1)
        )
        return best_rates

    def _make_state(
        self,
        forecast: Forecast,
        lost_seconds: NDArray[np.float64],
        expected_rates: NDArray[np.float64],
        testable_rates: NDArray[np.float64],
        lost_seconds_per_update: float,
    ) -> StridePlannerState:
        first_acceptance = forecast.mean.mean(axis=1)
        strides = tuple(
            StrideValue(
                stride, float(first_acceptance[i]), float(lost_seconds[i]),
                float(expected_rates[i]), float(testable_rates[i]),
                i == self._stride_index,
            )
            for i, stride in enumerate(STRIDES)
        )  # fmt: skip
        return StridePlannerState(
            strides, self._response.updates, forecast.gain, forecast.gain_deviation,
            self._price.last_update_seconds, lost_seconds_per_update, self._is_trial,
            self._trial_steps,
        )  # fmt: skip
