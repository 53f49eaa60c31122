"""Explores within a budget: an arm gives no evidence unless it runs, so probes have to run it.

There are four reasons to probe and one budget.  Every step of the engine earns a share of its
seconds as credit (`ObservationSchedule.budget_share` at gamma = 0, otherwise `probing_share`).  A
probe is charged with its actual loss against the current arm in the same seconds.

*Doubt.*  The value of an arm relative to the current one is uncertain because of acceptance and
cost, where the two arms differ.  An arm is probed if its expected improvement (Jones, Schonlau and
Welch 1998: sd * phi(u) + mean * Phi(u), u = mean / sd) until the next shift of traffic exceeds the
expected loss of a few steps by a factor; the arm with the best ratio is probed first.

*Disagreement.*  If the estimate for gamma = 0 was wrong, or a step's time has changed for no reason
that the model knows, gamma = 0 runs for a few steps (`CostUncertainty.is_off_due`).  These are
charged like any probe, but may overdraw the budget once, because a wrong estimate for gamma = 0 is
also what uses the budget up.

*Age.*  The learnt cost of an arm that does not run may come from steps that something else made
slow, and then the price of a probe is wrong, too.  An arm runs regardless of its price if it would
be chosen at the table's cost ratio, its learnt cost is at least twice as high, and it was not
measured for `stale_steps`.

*Time.*  At gamma = 0 nothing is observed, so better traffic would go unnoticed: see
`observation_schedule`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.plan import Probe
from controller.core.planning.observation_schedule import (
    ObservationSchedule,
    ObservationScheduler,
    optimistic_tokens,
    probing_share,
)
from controller.core.planning.planner import Values
from controller.core.planning.value_uncertainty import expected_improvement, relative_variance
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport


@recorded(
    "running_probe",
    "probe baseline_tokens_per_second switch_seconds lost_seconds",
    bucket="row",
    deadline="deadline_seconds",
    seen="steps_run",
    guessed="is_unprofiled",
    missed="steps_missed",
)
@dataclass(slots=True)
class _RunningProbe:
    probe: Probe
    row: int
    deadline_seconds: float
    steps_run: int
    # Of the current arm, per sequence.
    baseline_tokens_per_second: float
    is_unprofiled: bool
    switch_seconds: float
    lost_seconds: float = 0.0
    # Steps of other arms since its last step.
    steps_missed: int = 0


@dataclass(frozen=True, slots=True)
class ProbeSituation:
    """Describes the active row, its batch, and the arm (by index) that is chosen there.

    row: index of the plan's row, as in `values`; cost_bucket: of the cost table.  feasible: [arms]
    that may be probed; None: all.  discounts: as in `Planner.update`, [arms, rows] or None.
    """

    values: Values
    uncertainty: CostUncertainty
    row: int
    batch_size: int
    current_arm: int
    hazard: ShiftProbabilities
    cost_bucket: int
    feasible: NDArray[np.bool_] | None = None
    discounts: NDArray[np.float64] | None = None
    # Plain steps that may be lost against gamma = 0 now, see `loss_account`: by any probe, and by a
    # probe of an arm that has not run there.
    loss_budget_steps: float = math.inf
    first_run_budget_steps: float = math.inf

    @property
    def horizon_steps(self) -> float:
        """Steps for which a probe's result is expected to hold."""
        return 1 / self.hazard.any_shift


@recorded(
    "explorer",
    "probe_steps lost_seconds total_seconds _reports _step_credit",
    added="_remeasured_at _remeasures _gamma_zero_budget_share",
    probes="probe_count",
    credit="_credit_seconds",
    running="_running_probe",
    next_id="_next_probe_id",
    blind_steps="_steps_at_gamma_zero",
    is_scaled="_is_credit_scaled",
    consider_at="_next_review_report",
    looks="_probes_from_gamma_zero",
    seen="_last_drafted_report",
    remeasured_at="_last_remeasured_report",
    remeasures="_remeasuring_probe_id",
)
class Explorer:
    """Decides when to probe which arm, and keeps the credit.  One object per engine.

    draft_lag: steps between drafting for an arm and verifying these drafts.
    """

    def __init__(self, arms: Sequence[Arm], settings: PlannerSettings, draft_lag: int = 0) -> None:
        self._draft_lag = draft_lag
        self._arms = tuple(arms)
        self._off_arms = [i for i, arm in enumerate(arms) if arm.gamma == 0]
        self._settings = settings
        self._credit_seconds = settings.probe_credit_start_seconds
        # Steps that probes for doubt may take now.
        self._step_credit = settings.probe_step_credit_start
        self._running_probe: _RunningProbe | None = None
        self._next_probe_id = 1
        self._reports = 0
        self._steps_at_gamma_zero = 0
        self._observation_scheduler = ObservationScheduler(arms, settings)
        # At gamma = 0, the share of step time that probes may cost; None before the first decision.
        self._gamma_zero_budget_share: float | None = None
        # Probes from gamma = 0; the drafters take turns.
        self._probes_from_gamma_zero = 0
        # The report in which each drafter drafted last.
        self._last_drafted_report = dict.fromkeys((arm.drafter for arm in arms if arm.gamma), 0)
        # The report at which the last probe of a stale cost started, and its probe id.
        self._last_remeasured_report = -settings.remeasure_every_reports
        self._remeasuring_probe_id = 0
        self._is_credit_scaled = False
        self._next_review_report = 0
        self.probe_count = self.probe_steps = 0
        self.lost_seconds = 0.0
        self.total_seconds = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the credit."""
        self._settings = settings
        self._observation_scheduler = ObservationScheduler(self._arms, settings)
        self._credit_seconds = min(self._credit_seconds, settings.probe_credit_max_seconds)

    @property
    def spent_share(self) -> float:
        """Share of all step time that probing has cost so far (0 before the first step)."""
        return max(self.lost_seconds, 0.0) / self.total_seconds if self.total_seconds else 0.0

    @property
    def credit_seconds(self) -> float:
        """The seconds that probing may lose now."""
        return self._credit_seconds

    @property
    def running_probe(self) -> tuple[int, Probe] | None:
        """The running probe and its row, as (row, probe), or None."""
        return (self._running_probe.row, self._running_probe.probe) if self._running_probe else None

    @property
    def gamma_zero_budget_share(self) -> float:
        """The share of step time that probes from gamma = 0 may cost; 0 before the first one."""
        return self._gamma_zero_budget_share or 0.0

    @property
    def purpose(self) -> str:
        """Returns the purpose of the running probe, as text."""
        if self._running_probe and self._running_probe.probe.probe_id == self._remeasuring_probe_id:
            return "to measure again what it costs"
        return "to learn"

    def observe(
        self, report: StepReport, seconds: float, shift_probability: float, now: float
    ) -> None:
        """Earns credit, charges a probe's step, and ends a probe that is done or stuck.

        seconds: the step's, without parts that do not depend on the choice.  shift_probability: of
        any shift of traffic in one step.
        """
        self._reports += 1
        if report.gamma:
            self._last_drafted_report[report.drafter] = self._reports
        self._step_credit = min(
            self._step_credit + self._settings.probe_step_share,
            self._settings.probe_step_credit_max,
        )
        self._steps_at_gamma_zero = 0 if report.gamma else self._steps_at_gamma_zero + 1
        self.total_seconds += seconds
        share = None if report.gamma else self._gamma_zero_budget_share
        if share is None:
            share = probing_share(self._settings, shift_probability)
        earned_seconds = share * seconds
        running_probe = self._running_probe
        if running_probe and report.probe_id == running_probe.probe.probe_id:
            running_probe.steps_run += 1
            running_probe.steps_missed = 0
            self.probe_steps += 1
            self._step_credit -= 1
            # The baseline would not have generated tokens in ended rows either.
            baseline_tokens_per_second = running_probe.baseline_tokens_per_second * max(
                report.decoded_rows, 1
            )
            lost_seconds = seconds - report.generated_tokens / baseline_tokens_per_second
            if running_probe.steps_run == running_probe.probe.steps:
                # The first step includes the switch; the next step will include the switch back.
                lost_seconds += running_probe.switch_seconds
            self.lost_seconds += lost_seconds
            previous_loss, running_probe.lost_seconds = (
                running_probe.lost_seconds,
                running_probe.lost_seconds + lost_seconds,
            )
            if running_probe.is_unprofiled:
                # If costs are unknown, the whole probe is charged: a step's gain offsets losses.
                earned_seconds -= max(running_probe.lost_seconds, 0.0) - max(previous_loss, 0.0)
            else:
                earned_seconds -= max(lost_seconds, 0.0)
        elif running_probe:
            running_probe.steps_missed += 1
        self._credit_seconds = min(
            self._credit_seconds + earned_seconds, self._settings.probe_credit_max_seconds
        )
        if running_probe and (
            running_probe.steps_run >= running_probe.probe.steps
            or running_probe.steps_missed >= self._settings.probe_patience_steps
            or now > running_probe.deadline_seconds
        ):
            self._running_probe = None

    def start_probe_if_worthwhile(self, situation: ProbeSituation, now: float) -> None:
        """Starts a probe in the active row if one is worth its price and the credit suffices."""
        schedule = self._schedule_observation(situation)
        self._drop_probe_of_other_row(situation.row)
        if self._running_probe or self._settings.probe_share == 0 or len(self._arms) < 2:
            return
        values, row, current_arm = situation.values, situation.row, situation.current_arm
        if situation.uncertainty.is_unprofiled and not self._is_credit_scaled:
            # The settings do not depend on how long a step takes on this engine.
            self._is_credit_scaled = True
            start_credit_seconds = self._settings.cold_credit_steps * float(
                values.costs.seconds[current_arm, row]
            )
            self._credit_seconds = min(
                start_credit_seconds, self._settings.probe_credit_max_seconds
            )
        if (arm := self._stale_arm(situation)) is not None:
            steps = self._settings.remeasure_steps + (values.catch_up_seconds.item(arm, row) > 0)
            self._last_remeasured_report, self._remeasuring_probe_id = (
                self._reports,
                self._next_probe_id,
            )
        else:
            candidate = self._choose_probe(situation, schedule)
            if candidate is None:
                return
            arm, steps = candidate
            steps = self._affordable_steps(situation, arm, steps)
            if steps == 0:
                return
        # The first steps still verify drafts made for the previous choice.
        steps += self._draft_lag
        probe = Probe(self._next_probe_id, self._arms[arm], steps)
        self._next_probe_id += 1
        self.probe_count += 1
        self._running_probe = _RunningProbe(
            probe,
            row,
            now + self._settings.probe_patience_seconds,
            0,
            float(values.tokens_per_second[current_arm, row]) / situation.batch_size,
            situation.uncertainty.is_unprofiled,
            values.switch_seconds,
        )

    def _drop_probe_of_other_row(self, row: int) -> None:
        """Cancels a probe of another row, which the batch has left."""
        running_probe = self._running_probe
        if (
            running_probe
            and running_probe.row != row
            and running_probe.steps_missed >= self._settings.other_row_patience_steps
        ):
            self._running_probe = None

    def _schedule_observation(self, situation: ProbeSituation) -> ObservationSchedule | None:
        """Returns the schedule of probes from gamma = 0, if that is chosen; notes its budget."""
        if self._arms[situation.current_arm].gamma:
            return None
        values, row = situation.values, situation.row
        tokens_per_second = values.tokens_per_second[:, row]
        if situation.discounts is not None:
            tokens_per_second = tokens_per_second * situation.discounts[:, row]
        schedule = self._observation_scheduler.schedule(
            tokens_per_second.tolist(),
            values.costs.seconds[:, row].tolist(),
            situation.batch_size,
            values.catch_up_price,
            situation.hazard,
            None if situation.feasible is None else situation.feasible.tolist(),
        )
        self._gamma_zero_budget_share = None if schedule is None else schedule.budget_share
        return schedule

    def _choose_probe(
        self, situation: ProbeSituation, schedule: ObservationSchedule | None
    ) -> tuple[int, int] | None:
        """Returns the arm to probe and the number of steps, or None."""
        off_arm = self._gamma_zero_check_arm(situation)
        if off_arm is not None:
            return off_arm, self._settings.off_check_steps
        if self._reports >= self._next_review_report:
            self._next_review_report = self._reports + self._settings.review_every_reports
            # The first step may include a catch-up: the second one shows the cost.
            steps = max(2, self._exposure_steps(situation.batch_size))
            # Without a profile all costs are unknown, and only the lost time is limited.
            if situation.uncertainty.is_unprofiled or steps <= self._step_credit:
                best_arm = self._most_informative_arm(situation, steps)
                if best_arm is not None:
                    is_new = not situation.uncertainty.has_run(best_arm, situation.cost_bucket)
                    # The first probe only measures the cost, for which 2 steps are enough.
                    return best_arm, 2 if situation.uncertainty.is_unprofiled and is_new else steps
        return self._choose_probe_from_gamma_zero(situation, schedule)

    def _choose_probe_from_gamma_zero(
        self, situation: ProbeSituation, schedule: ObservationSchedule | None
    ) -> tuple[int, int] | None:
        """Returns the arm and the steps of a probe from gamma = 0, if it is due and affordable."""
        if schedule is None or self._steps_at_gamma_zero < schedule.interval_steps:
            return None
        values, row = situation.values, situation.row
        arm, steps = schedule.probes[self._probes_from_gamma_zero % len(schedule.probes)]
        tokens_per_second = values.tokens_per_second[:, row]
        loss = max(1 - tokens_per_second[arm] / tokens_per_second[situation.current_arm], 0.0)
        lost_seconds = steps * loss * values.costs.seconds[arm, row]
        if lost_seconds + values.catch_up_seconds[arm, row] > self._credit_seconds:
            return None
        self._probes_from_gamma_zero += 1
        return arm, steps

    def _affordable_steps(self, situation: ProbeSituation, arm: int, steps: int) -> int:
        """Returns how many of the steps the loss budget allows.

        The loss is that against gamma = 0, in a bad case.
        """
        values, row = situation.values, situation.row
        off_arms = self._off_arms
        if not off_arms or self._arms[arm].gamma == 0:
            return steps
        seconds = values.costs.seconds.item
        plain_seconds = min([seconds(i, row) for i in off_arms])
        log_variance = relative_variance(
            values, situation.uncertainty, situation.cost_bucket, situation.current_arm
        ).item(arm)
        pessimistic_tokens = (1 + values.expected_accepted.item(arm, row)) * math.exp(
            -2 * math.sqrt(log_variance)
        )
        loss_per_step = max(0.0, seconds(arm, row) / plain_seconds - max(1.0, pessimistic_tokens))
        fixed_loss_steps = (
            values.catch_up_seconds.item(arm, row) + 2 * values.switch_seconds
        ) / plain_seconds
        is_first_run = not situation.uncertainty.has_run(arm, situation.cost_bucket)
        budget_steps = (
            situation.first_run_budget_steps if is_first_run else situation.loss_budget_steps
        ) - fixed_loss_steps
        if budget_steps < loss_per_step:
            return 0
        return int(min(steps, budget_steps / loss_per_step)) if loss_per_step else steps

    def _stale_arm(self, situation: ProbeSituation) -> int | None:
        """Returns the arm that is not chosen only because of a stale cost, or None."""
        if self._reports - self._last_remeasured_report < self._settings.remeasure_every_reports:
            return None
        values, row, current_arm = situation.values, situation.row, situation.current_arm
        drift: list[float] = situation.uncertainty.drift[:, situation.cost_bucket].tolist()
        # The drifts of costs that are high enough to be measured again.
        min_drift = self._settings.remeasure_drift * drift[current_arm]
        drifted_arms = [arm for arm, factor in enumerate(drift) if factor >= min_drift]
        if not drifted_arms:
            return None
        is_stale = situation.uncertainty.stale_arms(situation.cost_bucket)
        tokens_per_second = values.tokens_per_second[:, row]
        best_arm, best_gain = None, self._settings.switch_margin
        feasible = situation.feasible
        for arm in drifted_arms:
            if not is_stale[arm] or (feasible is not None and not feasible[arm]):
                continue
            relative_drift = drift[arm] / drift[current_arm]
            gain = tokens_per_second[arm] * relative_drift / tokens_per_second[current_arm] - 1
            if gain > best_gain:
                best_arm, best_gain = arm, gain
        return best_arm

    def _gamma_zero_check_arm(self, situation: ProbeSituation) -> int | None:
        """Returns the arm with gamma = 0 if a check is due and the last one is paid back."""
        if self._arms[situation.current_arm].gamma == 0:
            return None
        seconds, value, row = (
            situation.values.costs.seconds,
            situation.values.tokens_per_second,
            situation.row,
        )
        for arm in self._off_arms:
            if situation.feasible is None or situation.feasible[arm]:
                gain = value.item(situation.current_arm, row) / value.item(arm, row)
                is_due = situation.uncertainty.is_off_due(situation.cost_bucket, gain)
                check_seconds = self._settings.off_check_steps * seconds.item(arm, row)
                return arm if is_due and self._credit_seconds + check_seconds >= 0 else None
        return None

    def _exposure_steps(self, batch_size: int) -> int:
        needed_steps = math.ceil(self._settings.probe_exposures / batch_size)
        return max(1, min(self._settings.probe_steps_max, needed_steps))

    def _most_informative_arm(self, situation: ProbeSituation, steps: int) -> int | None:
        """Returns the arm whose probe is expected to gain most for its price, if that pays."""
        variances = relative_variance(
            situation.values,
            situation.uncertainty,
            situation.cost_bucket,
            situation.current_arm,
            only_unobserved=True,
        ).tolist()
        best_arm, best_return = None, self._settings.probe_return_min
        for arm in self._doubtful_arms(situation):
            deviation = math.sqrt(variances[arm])
            expected_return = self._expected_return(situation, arm, steps, deviation)
            if expected_return > best_return:
                best_arm, best_return = arm, expected_return
        return best_arm if best_arm is not None and variances[best_arm] > 0 else None

    def _doubtful_arms(self, situation: ProbeSituation) -> list[int]:
        """Returns the arms, by index, that a probe for doubt may run."""
        feasible, uncertainty = situation.feasible, situation.uncertainty
        reachable = (
            uncertainty.reachable_arms(situation.cost_bucket) if uncertainty.is_unprofiled else None
        )
        return [
            arm
            for arm in range(len(self._arms))
            if arm != situation.current_arm
            and (feasible is None or feasible[arm])
            and (reachable is None or reachable[arm])
        ]

    def _expected_return(
        self, situation: ProbeSituation, arm: int, steps: int, deviation: float
    ) -> float:
        """Returns the expected improvement by a probe over its price; 0 above the credit.

        deviation: standard deviation of the log of the arm's value over the current arm's.
        """
        values, row = situation.values, situation.row
        tokens_per_second, seconds = values.tokens_per_second.item, values.costs.seconds.item
        relative_gain = tokens_per_second(arm, row) / tokens_per_second(situation.current_arm, row)
        relative_gain -= 1
        gain = expected_improvement(relative_gain, deviation * (1 + relative_gain))
        gain += self._idle_drafter_gain(situation, arm)
        loss = max(-relative_gain, 0.0)
        if situation.uncertainty.is_unprofiled:
            # The cost was not measured: the price is that of a bad case.
            loss = max(1 - (1 + relative_gain) * math.exp(-deviation), 0.0)
        fixed_seconds = values.catch_up_seconds.item(arm, row) + 2 * values.switch_seconds
        price_steps = steps * (loss + fixed_seconds / (steps * seconds(arm, row)))
        if price_steps * seconds(arm, row) > self._credit_seconds:
            return 0.0
        # 2 % of the steps are added to the price: a probe without a loss still needs a switch.
        return gain * situation.horizon_steps / (price_steps + 0.02 * steps)

    def _idle_drafter_gain(self, situation: ProbeSituation, arm: int) -> float:
        """Returns the possible improvement by an arm whose drafter was idle for long.

        Traffic that suits an idle drafter better need not change the running one's acceptance.
        """
        values, row, current = situation.values, situation.row, situation.current_arm
        gamma, drafter = self._arms[arm].gamma, self._arms[arm].drafter
        current_arm = self._arms[current]
        if not (gamma and current_arm.gamma) or drafter == current_arm.drafter:
            return 0.0
        seconds = values.costs.seconds.item
        current_rate = (1 + values.expected_accepted.item(current, row)) / seconds(current, row)
        idle_reports = self._reports - self._last_drafted_report[drafter]
        change_probability = 1 - math.exp(-idle_reports / situation.horizon_steps)
        optimistic_rate = optimistic_tokens(gamma, self._settings) / seconds(arm, row)
        optimistic_gain = max(optimistic_rate / current_rate - 1, 0.0)
        return self._settings.idle_drafter_fit_probability * change_probability * optimistic_gain

    def cancel(self) -> None:
        """Cancels the running probe, because the allowed or required arms have changed."""
        self._running_probe = None
