"""Explores within a budget: an arm gives no evidence unless it runs, so probes have to run it.

There are four reasons to probe and one budget.  Every step of the engine earns a share of its
seconds as credit (`observation_cost.budget`, at most `probe_share`).  A probe is charged with its
actual loss against the current arm in the same seconds.

*Doubt.*  The value of an arm relative to the current one is uncertain because of acceptance and
cost, where the two arms differ.  An arm is probed if its expected improvement (Jones, Schonlau and
Welch 1998: sd * phi(u) + mean * Phi(u), u = mean / sd) until the next shift of traffic exceeds the
expected loss of a few steps by a factor; the arm with the best ratio is probed first.

*Disagreement.*  If the estimate for gamma = 0 was wrong, or a step's time has changed for no reason
that the model knows, gamma = 0 runs for a few steps (`CostUncertainty.off_is_due`).  These are
charged like any probe, but may overdraw the budget once, because a wrong estimate for gamma = 0 is
also what uses the budget up.

*Age.*  The learnt cost of an arm that does not run may come from steps that something else made
slow, and then the price of a probe is wrong, too.  An arm runs regardless of its price if it would
be chosen at the table's cost ratio, its learnt cost is at least twice as high, and it was not
measured for `STALE_STEPS`.

*Time.*  At gamma = 0 nothing is observed, so better traffic would go unnoticed: see `_look`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.plan import Probe
from controller.core.planning.doubt import expected_improvement, relative_variance
from controller.core.planning.observation_cost import ObservationCost, hopeful_tokens
from controller.core.planning.planner import Values
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# A probe whose steps do not run is cancelled after this time, or after this many steps of other
# arms; sooner if the batch has left its bucket.
_PROBE_PATIENCE_SECONDS = 2.0
_PROBE_PATIENCE_STEPS = 48
_ELSEWHERE_PATIENCE_STEPS = 3
# Probes for doubt are considered every this many reports.
_CONSIDER_EVERY = 12
# Steps of gamma = 0 that settle a disagreement: the first one may include the cost of the switch.
_CHECK_STEPS = 3
# Steps that measure a stale cost again: the first one may include the cost of the switch.  Reports
# between two such probes, and the least factor on the table, relative to the current arm's, for
# one: the cap of a profile.  With a smaller factor, probes of arms that are really expensive would
# cost more than they gain.
_REMEASURE_STEPS = 2
_REMEASURE_EVERY = 50
_REMEASURE_DRIFT = 2.0
# Steps of probes for doubt: their share of all steps, the initial credit and its maximum.
_STEP_SHARE = 0.011
_STEPS_START = 24.0
_STEPS_MAX = 48.0
# The probability that an idle drafter fits the traffic after a change.
_HOPE = 0.25
# Initial credit without a profile, in steps.
_COLD_STEPS = 0.75
# Expected improvement over the horizon must exceed the price by this factor.
_RETURN_MIN = 2.0


@recorded("running_probe")
@dataclass(slots=True)
class _Running:
    probe: Probe
    bucket: int
    deadline: float
    seen: int
    # Of the current arm, per sequence.
    baseline_tokens_per_second: float
    guessed: bool
    switch_seconds: float
    lost_seconds: float = 0.0
    # Steps of other arms since its last step.
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """Describes the active row, its batch, and the arm (by index) that is chosen there.

    bucket: index of the plan's row, as in `values` and `observation`; cost_bucket: of the cost
    table.  horizon_steps: steps for which a probe's result is expected to hold.  feasible: [arms]
    that may be probed; None: all.
    """

    values: Values
    uncertainty: CostUncertainty
    bucket: int
    batch_size: int
    current: int
    observation: ObservationCost | None
    horizon_steps: float
    cost_bucket: int
    feasible: NDArray[np.bool_] | None = None
    # Plain steps that may be lost against gamma = 0 now, see `loss_account`: by any probe, and by a
    # probe of an arm that has not run there.
    room: float = math.inf
    room_for_news: float = math.inf


@recorded(
    "explorer",
    "probes probe_steps lost_seconds total_seconds _credit _running _next_id _reports _blind_steps "
    "_is_scaled _consider_at _step_credit _looks _seen",
    added="_remeasured_at _remeasures",
)
class Explorer:
    """Decides when to probe which arm, and keeps the credit.  One object per engine.

    draft_lag: steps between drafting for an arm and verifying these drafts.
    """

    def __init__(self, arms: Sequence[Arm], settings: PlannerSettings, draft_lag: int = 0) -> None:
        self._draft_lag = draft_lag
        self._arms = tuple(arms)
        self._settings = settings
        self._credit = settings.probe_credit_start_seconds
        # Steps that probes for doubt may take now.
        self._step_credit = _STEPS_START
        self._running: _Running | None = None
        self._next_id = 1
        self._reports = 0
        self._blind_steps = 0
        # Probes from gamma = 0; the drafters take turns.
        self._looks = 0
        # The report in which each drafter drafted last.
        self._seen = dict.fromkeys((arm.drafter for arm in arms if arm.gamma), 0)
        # The report at which the last probe of a stale cost started, and its probe id.
        self._remeasured_at = -_REMEASURE_EVERY
        self._remeasures = 0
        self._is_scaled = False
        self._consider_at = 0
        self.probes = self.probe_steps = 0
        self.lost_seconds = 0.0
        self.total_seconds = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the credit."""
        self._settings = settings
        self._credit = min(self._credit, settings.probe_credit_max_seconds)

    @property
    def probe_share(self) -> float:
        """Share of all step time that probing has cost so far (0 before the first step)."""
        return max(self.lost_seconds, 0.0) / self.total_seconds if self.total_seconds else 0.0

    @property
    def credit_seconds(self) -> float:
        """The seconds that probing may lose now."""
        return self._credit

    @property
    def running(self) -> tuple[int, Probe] | None:
        """The running probe and its row, as (row, probe), or None."""
        return (self._running.bucket, self._running.probe) if self._running else None

    @property
    def purpose(self) -> str:
        """Returns the purpose of the running probe, as text."""
        if self._running and self._running.probe.probe_id == self._remeasures:
            return "to measure again what it costs"
        return "to learn"

    def observe(self, report: StepReport, seconds: float, share: float, now: float) -> None:
        """Earns credit, charges a probe's step, and ends a probe that is done or stuck.

        seconds: the step's, without parts that do not depend on the choice.  share: of step time
        that probing may cost now, see `observation_cost.budget`.
        """
        self._reports += 1
        if report.gamma:
            self._seen[report.drafter] = self._reports
        self._step_credit = min(self._step_credit + _STEP_SHARE, _STEPS_MAX)
        self._blind_steps = 0 if report.gamma else self._blind_steps + 1
        self.total_seconds += seconds
        earned = share * seconds
        running = self._running
        if running and report.probe_id == running.probe.probe_id:
            running.seen += 1
            running.missed = 0
            self.probe_steps += 1
            self._step_credit -= 1
            # The baseline would not have generated tokens in ended rows either.
            baseline = running.baseline_tokens_per_second * max(report.decoded_rows, 1)
            lost = seconds - report.generated_tokens / baseline
            if running.seen == running.probe.steps:
                # The first step includes the switch; the next step will include the switch back.
                lost += running.switch_seconds
            self.lost_seconds += lost
            before, running.lost_seconds = running.lost_seconds, running.lost_seconds + lost
            if running.guessed:
                # If costs are unknown, the whole probe is charged: a step's gain offsets losses.
                earned -= max(running.lost_seconds, 0.0) - max(before, 0.0)
            else:
                earned -= max(lost, 0.0)
        elif running:
            running.missed += 1
        self._credit = min(self._credit + earned, self._settings.probe_credit_max_seconds)
        if running and (
            running.seen >= running.probe.steps
            or running.missed >= _PROBE_PATIENCE_STEPS
            or now > running.deadline
        ):
            self._running = None

    def consider(self, at: Situation, now: float) -> None:
        """Starts a probe in the active row if one is worth its price and the credit suffices."""
        self._leave(at.bucket)
        if self._running or self._settings.probe_share == 0 or len(self._arms) < 2:
            return
        values, bucket, current = at.values, at.bucket, at.current
        if at.uncertainty.guessed and not self._is_scaled:
            # The settings do not depend on how long a step takes on this engine.
            self._is_scaled = True
            some = _COLD_STEPS * float(values.costs.seconds[current, bucket])
            self._credit = min(some, self._settings.probe_credit_max_seconds)
        if (arm := self._stale(at)) is not None:
            steps = _REMEASURE_STEPS + (values.catch_up.item(arm, bucket) > 0)
            self._remeasured_at, self._remeasures = self._reports, self._next_id
        else:
            wanted = self._wanted(at)
            if wanted is None:
                return
            arm, steps = wanted
            steps = self._affordable(at, arm, steps)
            if steps == 0:
                return
        # The first steps still verify drafts made for the previous choice.
        steps += self._draft_lag
        probe = Probe(self._next_id, self._arms[arm], steps)
        self._next_id += 1
        self.probes += 1
        self._running = _Running(
            probe,
            bucket,
            now + _PROBE_PATIENCE_SECONDS,
            0,
            float(values.value[current, bucket]) / at.batch_size,
            at.uncertainty.guessed,
            values.switch_seconds,
        )

    def _leave(self, bucket: int) -> None:
        """Cancels a probe of another row, which the batch has left."""
        running = self._running
        if running and running.bucket != bucket and running.missed >= _ELSEWHERE_PATIENCE_STEPS:
            self._running = None

    def _wanted(self, at: Situation) -> tuple[int, int] | None:
        """Returns the arm to probe and the number of steps, or None."""
        check = self._check(at)
        if check is not None:
            return check, _CHECK_STEPS
        here = at.values.value[:, at.bucket]
        relative = here / here[at.current] - 1
        if self._reports >= self._consider_at:
            self._consider_at = self._reports + _CONSIDER_EVERY
            # The first step may include a catch-up: the second one shows the cost.
            steps = max(2, self._steps(at.batch_size))
            # Without a profile all costs are unknown, and only the lost time is limited.
            if at.uncertainty.guessed or steps <= self._step_credit:
                best = self._by_doubt(at, steps, relative)
                if best is not None:
                    is_new = not at.uncertainty.ran[best, at.cost_bucket]
                    # The first probe only measures the cost, for which 2 steps are enough.
                    return best, 2 if at.uncertainty.guessed and is_new else steps
        return self._look(at, relative)

    def _look(self, at: Situation, relative: NDArray[np.float64]) -> tuple[int, int] | None:
        """Returns the arm and the steps of a probe from gamma = 0, if it is due and affordable.

        relative: [arms], relative gain of each arm's value over the current arm's.
        """
        observation, values, bucket = at.observation, at.values, at.bucket
        if observation is None or self._arms[at.current].gamma:
            return None
        if self._blind_steps < observation.interval[bucket]:
            return None
        drafter = self._looks % len(observation.arm)
        arm, steps = int(observation.arm[drafter, bucket]), int(observation.steps[drafter, bucket])
        if at.feasible is not None and not at.feasible[arm]:
            return None
        lost = steps * max(-float(relative[arm]), 0.0) * values.costs.seconds[arm, bucket]
        if lost + values.catch_up[arm, bucket] > self._credit:
            return None
        self._looks += 1
        return arm, steps

    def _affordable(self, at: Situation, arm: int, steps: int) -> int:
        """Returns how many of the steps the loss budget allows.

        The loss is that against gamma = 0, in a bad case.
        """
        values, bucket = at.values, at.bucket
        off = [i for i, one in enumerate(self._arms) if one.gamma == 0]
        if not off or self._arms[arm].gamma == 0:
            return steps
        seconds = values.costs.seconds[:, bucket]
        plain = float(seconds[off].min())
        doubt = relative_variance(values, at.uncertainty, self._arms, at.cost_bucket, at.current)
        gained = float((1 + values.expected[arm, bucket]) * np.exp(-2 * np.sqrt(doubt[arm])))
        each = max(0.0, float(seconds[arm]) / plain - max(1.0, gained))
        once = (float(values.catch_up[arm, bucket]) + 2 * values.switch_seconds) / plain
        news = not at.uncertainty.ran[arm, at.cost_bucket]
        room = (at.room_for_news if news else at.room) - once
        if room < each:
            return 0
        return min(steps, int(room / each)) if each else steps

    def _stale(self, at: Situation) -> int | None:
        """Returns the arm that is not chosen only because of a stale cost, or None."""
        if self._reports - self._remeasured_at < _REMEASURE_EVERY:
            return None
        values, bucket, current = at.values, at.bucket, at.current
        drift = at.uncertainty.drift[:, at.cost_bucket]
        drift = drift / drift[current]
        due = at.uncertainty.stale(at.cost_bucket) & (drift >= _REMEASURE_DRIFT)
        if at.feasible is not None:
            due &= at.feasible
        gain = values.value[:, bucket] * drift / values.value[current, bucket] - 1
        gain[~due] = 0.0
        best = int(gain.argmax())
        return best if gain[best] > self._settings.switch_margin else None

    def _check(self, at: Situation) -> int | None:
        """Returns the arm with gamma = 0 if a check is due and the last one is paid back."""
        if self._arms[at.current].gamma == 0:
            return None
        seconds, value = at.values.costs.seconds[:, at.bucket], at.values.value[:, at.bucket]
        for i, arm in enumerate(self._arms):
            if arm.gamma == 0 and (at.feasible is None or at.feasible[i]):
                gain = float(value[at.current] / value[i])
                is_due = at.uncertainty.off_is_due(at.cost_bucket, gain)
                earned = self._credit + _CHECK_STEPS * seconds[i] >= 0
                return i if is_due and earned else None
        return None

    def _steps(self, batch_size: int) -> int:
        wanted = math.ceil(self._settings.probe_exposures / batch_size)
        return max(1, min(self._settings.probe_steps_max, wanted))

    def _by_doubt(self, at: Situation, steps: int, relative: NDArray[np.float64]) -> int | None:
        values, current = at.values, at.current
        seconds = values.costs.seconds[:, at.bucket]
        once = values.catch_up[:, at.bucket] + 2 * values.switch_seconds
        loss = np.maximum(-relative, 0.0) + once / (steps * seconds)
        doubt = np.sqrt(
            relative_variance(
                values, at.uncertainty, self._arms, at.cost_bucket, current, unseen=True
            )
        )
        gain = expected_improvement(relative, doubt * (1 + relative))
        gain += self._hope(at)
        if at.uncertainty.guessed:
            # The cost was not measured: the price is that of a bad case.
            worse = (1 + relative) * np.exp(-doubt) - 1
            loss = np.maximum(-worse, 0.0) + once / (steps * seconds)
            gain[~at.uncertainty.within_reach(at.cost_bucket)] = 0.0
        price = steps * loss
        # A probe that loses nothing still needs a switch.
        ratio = gain * at.horizon_steps / (price + 0.02 * steps)
        ratio[price * seconds > self._credit] = 0.0
        ratio[current] = 0.0
        if at.feasible is not None:
            ratio[~at.feasible] = 0.0
        best = int(ratio.argmax())
        return best if ratio[best] > _RETURN_MIN and doubt[best] > 0 else None

    def _hope(self, at: Situation) -> NDArray[np.float64]:
        """Returns [arms], the possible improvement by drafters that were idle for long.

        Traffic that suits an idle drafter better need not change the running one's acceptance.
        """
        found = np.zeros(len(self._arms))
        running = self._arms[at.current]
        if running.gamma == 0 or len(self._seen) < 2:
            return found
        seconds = at.values.costs.seconds[:, at.bucket]
        here = (1 + at.values.expected[at.current, at.bucket]) / seconds[at.current]
        for i, arm in enumerate(self._arms):
            if arm.gamma and arm.drafter != running.drafter:
                idle = self._reports - self._seen[arm.drafter]
                changed = 1 - math.exp(-idle / at.horizon_steps)
                hopeful = hopeful_tokens(arm.gamma) / seconds[i]
                found[i] = _HOPE * changed * max(hopeful / here - 1, 0.0)
        return found

    def cancel(self) -> None:
        """Cancels the running probe, because the allowed or required arms have changed."""
        self._running = None
