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
_MOST_STEPS_LOST = 3.0
_RATE_FLOOR = 0.05
# Rounds between two updates; 0 is off.  The paper's, arXiv:2605.09329, Tables 3 and 7.
STRIDES: Final = (0, 50, 20, 10, 5, 2, 1)
# The horizon of a plan in rounds.
_HORIZON_ROUNDS = 10_000.0
# Relative gain required of another stride, and of updating at all.
_SWITCH_MARGIN = 0.005
_START_MARGIN = 0.004
# Share of the optimistic gain that must be certain.
_CAUTION = 0.33
# Rounds between two changes: acceptance responds slowly.
_DWELL_ROUNDS = 64
# Loss budget of trials: share of all time, initial budget and maximum, in steps.
_TRIAL_SHARE = 0.005
_TRIAL_START_STEPS = 16.0
_TRIAL_MOST_STEPS = 40.0
# A trial needs this budget in steps to begin, and lasts this many rounds if it stays promising.
_TRIAL_LEAST_STEPS = 8.0
_TRIAL_ROUNDS = 320
# The first stride tried from off: its settled gain is about half of the possible gain.
_FIRST_TRIAL = STRIDES.index(10)
# Upper bound of a position's forecast acceptance.
_MOST_CONDITIONAL = 0.995


@recorded("update_costs")
@dataclass(slots=True)
class _Paid:
    """Holds means over the updates at similar batch sizes."""

    updates: int = 0
    lost: float = 0.0
    beside: float = 0.0


@recorded("update_price", "seconds _paid _open_lost _open_steps")
class UpdatePrice:
    """Estimates the seconds lost by an update, and the steps beside it; by batch size.

    An update runs beside decode steps (in another process or another stream) and slows them down:
    they contend for processors, memory bandwidth or the GPU.  Its cost is the excess of all these
    steps together over their expected seconds, from the hand-over to the landing of the update.
    """

    def __init__(self) -> None:
        self._paid: dict[int, _Paid] = {}
        self._open_lost = 0.0
        self._open_steps = 0
        self.seconds = 0.0

    def fold(self, report: StepReport, expected_seconds: float) -> float:
        """Adds a step; returns the seconds that it lost because of an update."""
        flags = report.flags
        lost = 0.0
        if flags.updating:
            self._open_steps += 1
            if not flags.distorts_shape:
                most = _MOST_STEPS_LOST * expected_seconds
                lost = min(report.step_seconds - expected_seconds, most)
                self._open_lost += lost
        if report.update_seconds:
            self.seconds = report.update_seconds
            paid = self._paid.setdefault(report.batch_size.bit_length(), _Paid())
            paid.updates += 1
            rate = max(_RATE_FLOOR, 1 / paid.updates)
            paid.lost += rate * (self._open_lost - paid.lost)
            paid.beside += rate * (self._open_steps - paid.beside)
            self._open_lost, self._open_steps = 0.0, 0
        return lost

    @property
    def known(self) -> bool:
        """Whether an update was observed."""
        return bool(self._paid)

    def per_update(self, batch_size: int, step_seconds: float) -> float:
        """Returns the seconds that an update takes from the steps beside it, 0 or more."""
        paid = self._nearest(batch_size)
        return _GUESSED_STEPS_LOST * step_seconds if paid is None else max(0.0, paid.lost)

    def updates_per_round(self, batch_size: int, stride: int) -> float:
        """Returns the updates per round: the stride's, limited by the duration of an update."""
        paid = self._nearest(batch_size)
        beside = _GUESSED_STEPS_BESIDE if paid is None else paid.beside
        return 1 / max(stride, beside, 1.0)

    def _nearest(self, batch_size: int) -> _Paid | None:
        if not self._paid:
            return None
        bits = batch_size.bit_length()
        return self._paid[min(self._paid, key=lambda known: abs(known - bits))]


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
class RegimeState:
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
    "state _at _moved_at _otherwise _price _response _rounds _trial_loss _trial_steps _trying",
)
class RegimePlanner:
    """Chooses the stride for one engine.  learner: name of the drafter that can be updated."""

    def __init__(self, arms: Sequence[Arm], learner: str) -> None:
        self._learner = learner
        self._learns = np.array([arm.drafter == self._learner for arm in arms])
        self._gammas = np.array([arm.gamma for arm in arms])
        # Steps at gamma = 0 count as the learner's, whichever drafter they name.
        self._cheap = self._learns | (self._gammas == 0)
        self._response = UpdateResponse()
        self._price = UpdatePrice()
        # Index of the present stride, and of the stride that would be chosen without a trial.
        self._at = self._otherwise = 0
        self._rounds = self._moved_at = 0
        self._trying = False
        self._trial_steps = _TRIAL_START_STEPS
        # Expected loss of the trial, as a share of every step.
        self._trial_loss = 0.0
        self.state: RegimeState | None = None

    @property
    def regime(self) -> Regime:
        """The last chosen regime."""
        return Regime(RegimeMode.ONLINE, STRIDES[self._at]) if self._at else Regime()

    def observe(self, report: StepReport, expected_seconds: float) -> None:
        """Adds a report.  expected_seconds: of its step without an update beside it."""
        self._rounds += 1
        # A trainer that is still starting slows down no step.
        lost = self._trial_loss if self._price.known else 0.0
        self._trial_steps = min(self._trial_steps + _TRIAL_SHARE - lost, _TRIAL_MOST_STEPS)
        self._price.fold(report, expected_seconds)
        self._response.fold(report, drafted=report.drafter == self._learner)

    def update(
        self, values: Values, row: int, batch_size: int, feasible: NDArray[np.bool_] | None = None
    ) -> Regime:
        """Chooses the stride for the present batch, in its row of the plan.

        feasible: [arms], what may run there; None for all.
        """
        rates = [self._price.updates_per_round(batch_size, s) if s else 0.0 for s in STRIDES]
        seconds = values.costs.seconds[:, row]
        least = float(seconds[self._cheap].min())
        each = self._price.per_update(batch_size, least)
        paid = max(self._trial_steps, 0.0) * least
        forecast = self._response.forecast(
            rates, _HORIZON_ROUNDS, self._otherwise, paid / each if each else math.inf
        )
        lost = np.array(rates) * each
        if feasible is not None:
            seconds = np.where(feasible, seconds, np.inf)
        taken = seconds[:, None] + lost
        plain, hopeful, testable = (
            batch_size * self._goodput(values, row, ahead / forecast.now, taken)
            for ahead in (forecast.mean, forecast.hopeful, forecast.testable)
        )
        self._choose(plain, hopeful, testable, lost / least)
        self.state = self._state(forecast, lost, plain, testable, each)
        return self.regime

    def _choose(
        self,
        plain: NDArray[np.float64],
        hopeful: NDArray[np.float64],
        testable: NDArray[np.float64],
        lost: NDArray[np.float64],
    ) -> None:
        """Changes the stride if the present one has run long enough.  lost: shares of a step."""
        at, since = self._at, self._rounds - self._moved_at
        best = int(plain[1:].argmax()) + 1
        runs = at > 0 and not self._trying
        off = plain[0] * (1 - _START_MARGIN if runs else 1 + _START_MARGIN)
        if not self._response.is_reset_repeatedly:
            # Off may be better than estimated, which only steps without updates would show.
            unsure = hopeful - plain
            off += _CAUTION * (unsure[0] if self._otherwise else unsure[best])
        if plain[best] <= off:
            best = 0
        elif at and plain[best] <= plain[at] * (1 + _SWITCH_MARGIN):
            best = at
        wanted = best
        if self._trial_steps > (0.0 if self._trying else _TRIAL_LEAST_STEPS):
            hope = plain[best] * (1 + _SWITCH_MARGIN)
            if self._trying and at and since < _TRIAL_ROUNDS and testable[at] > hope:
                wanted = at
            else:
                beside = [i for i in (best - 1, best + 1) if 0 < i < len(STRIDES)]
                if at and self._response.updates and not self._response.is_reset_repeatedly:
                    beside.append(0)
                most = max(beside if best else [_FIRST_TRIAL], key=lambda i: float(testable[i]))
                wanted = most if testable[most] > hope else best
        spent = self._trying and self._trial_steps <= 0
        if wanted != at and (since >= _DWELL_ROUNDS or spent):
            self._at, self._moved_at = wanted, self._rounds
            self._trying = wanted != best
        elif at == best:
            self._trying = False
        self._otherwise = best if self._trying else self._at
        # A better stride that waits for the present one's dwell time is no trial.
        self._trial_loss = 0.0
        if self._trying:
            # In the worst case the more frequent updates gain nothing.
            worst = float(lost[self._at] - lost[best])
            self._trial_loss = max(0.0, 1 - float(plain[self._at] / plain[best]), worst)

    def _goodput(
        self,
        values: Values,
        row: int,
        factor: NDArray[np.float64],
        seconds: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Returns [strides], tokens per second of one sequence, with the best arm at each point.

        factor: [strides, points], on each conditional acceptance.  seconds: [arms, strides].
        """
        conditional = np.array(values.traffic.batch[self._learner].conditional)
        scaled = np.minimum(conditional * factor[..., None], _MOST_CONDITIONAL)
        drafted = np.cumsum(np.cumprod(scaled, axis=-1), axis=-1)
        expected = np.concatenate([np.zeros((*factor.shape, 1)), drafted], axis=-1)
        at_gamma = np.minimum(self._gammas, len(conditional))
        learnt = np.moveaxis(expected[..., at_gamma], -1, 0)
        gained = 1 + np.where(
            self._learns[:, None, None], learnt, values.expected[:, row, None, None]
        )
        best: NDArray[np.float64] = (gained / seconds[:, :, None]).max(axis=0).mean(axis=-1)
        return best

    def _state(
        self,
        forecast: Forecast,
        lost: NDArray[np.float64],
        plain: NDArray[np.float64],
        testable: NDArray[np.float64],
        each: float,
    ) -> RegimeState:
        first = forecast.mean.mean(axis=1)
        strides = tuple(
            StrideValue(
                stride, float(first[i]), float(lost[i]), float(plain[i]), float(testable[i]),
                i == self._at,
            )
            for i, stride in enumerate(STRIDES)
        )  # fmt: skip
        return RegimeState(
            strides, self._response.updates, forecast.gain, forecast.deviation,
            self._price.seconds, each, self._trying, self._trial_steps,
        )  # fmt: skip
