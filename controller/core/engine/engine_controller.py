"""One engine's decision loop: reports in, plans out.

    report -> acceptance, cost, catch-up, exploration account -> (at most every `replan_seconds`)
    values -> choice with hysteresis -> perhaps a probe -> plan, if anything changed

The only state is in this object; the only clock is the one passed in.  A second controller with the
same reports at the same times makes the same plans.

Two things change it: its inputs (`observe`, `set_overrides`, `force_arm`, ...) and decisions
(`next_plan`, `force_arm`, `make_last_plan`).  `current_plan`, `row_for_batch`, `decision`,
`values_with_overrides` and `acceptance_snapshots` only read it, and may be called at any time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from controller.core.acceptance.mixtures import MixtureEstimators
from controller.core.acceptance.traffic_estimator import TrafficCurves, TrafficEstimator
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.checks.engine_checks import EngineChecks
from controller.core.clock import Clock
from controller.core.cost.catch_up_cost import CatchUpEstimator
from controller.core.cost.live_estimates import ContextByBatch, PrefillPrice, SwitchPrice
from controller.core.cost.model import CostModel
from controller.core.cost.profile import Profile
from controller.core.cost.table import select_prior
from controller.core.engine.decision import Decision, Estimates, describe_decision, plan_reason
from controller.core.engine.prediction_audit import PredictionAudit
from controller.core.engine_spec import (
    Arm,
    EngineSpec,
    LostCapability,
    drafters_in_sync,
    has_stopped_reporting,
    newly_lost,
    require_introduced,
)
from controller.core.errors import StaleReportError, UnknownArmError
from controller.core.plan import MixtureRule, Plan, PlanRow, Probe, Reason, Regime
from controller.core.planning.baseline_planners import make_planner
from controller.core.planning.constraints import (
    RowConstraints,
    constrain_rows,
    overrides_for_engine,
)
from controller.core.planning.exploration import Explorer, ProbeSituation
from controller.core.planning.loss_account import LossAccount
from controller.core.planning.overrides import Override
from controller.core.planning.plan_table import (
    batch_buckets,
    drop_probes,
    make_forced_rows,
    make_row,
    make_rows,
    rows_for_probe,
)
from controller.core.planning.planner import Values
from controller.core.planning.value_uncertainty import DiscountRule
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import NO_FLAGS, StepReport
from controller.core.training.drafter_updates import DrafterUpdates
from controller.core.training.selective_training import TrainingSettings, TrainingState


@recorded(
    "controller",
    "reports traffic explorer updates _epoch _evaluated_at _last_step _plan _planner _switch_price "
    "warm_start",
    mixtures="mixture_estimators",
    cost="cost_model",
    catch_up="_catch_up_estimator",
    context="_context_by_batch",
    decided="_row_inputs",
    evaluated_reports="_reports_at_evaluation",
    forced="_forced_arm",
    last_batch="last_batch_size",
    losses="_loss_account",
    parting="_is_stopping",
    plan_time="_plan_issued_at",
    prefill="_prefill_price",
    unsettled_until="_unsettled_until_report",
)
class EngineController:
    """Estimates and plans for one introduced engine.  The first plan is made at once.

    overrides: active from the first plan on; those for other engines are ignored.  training_state:
    the stored state of its drafter's training.  Raises ProfileMismatchError if `profile` belongs to
    another fingerprint.
    """

    def __init__(
        self,
        spec: EngineSpec,
        settings: PlannerSettings,
        profile: Profile | None,
        clock: Clock,
        training: TrainingSettings | None = None,
        *,
        overrides: Iterable[Override] = (),
        training_state: TrainingState | None = None,
    ) -> None:
        if profile is not None:
            profile.require_match(spec.fingerprint, spec.drafters)
        self.spec = spec
        self._settings = settings
        self._clock = clock
        self.arms = spec.arms
        self._arm_index = {(arm.drafter, arm.gamma): i for i, arm in enumerate(self.arms)}
        graph_sizes = spec.fingerprint.graph_batch_sizes
        self._buckets = batch_buckets(spec.max_batch_size, graph_sizes, len(self.arms))
        self._bucket_sizes = np.asarray(self._buckets, dtype=np.float64)
        self.traffic = TrafficEstimator(spec.drafters, settings)
        self.mixture_estimators = MixtureEstimators(spec.drafters, settings)
        self.cost_model = self._make_cost_model(profile)
        self._catch_up_estimator = CatchUpEstimator(
            [d.name for d in spec.drafters],
            profile.catch_up_seconds_per_token if profile else 0.0,
            spec.remaining_capabilities,
            settings,
            drafters_in_sync(spec.drafters),
        )
        self._switch_price = SwitchPrice(settings)
        self._prefill_price = PrefillPrice(settings)
        self._loss_account = LossAccount(self.arms, settings)
        self._planner = make_planner(self.arms, self._buckets, settings)
        self._discount_rule = DiscountRule(self.arms, settings)
        # The overrides for this engine, at any batch size.
        self.overrides = overrides_for_engine(overrides, spec)
        self._set_planner_rows()
        self.explorer = Explorer(self.arms, settings, spec.capabilities.draft_lag)
        self.updates = DrafterUpdates(
            spec, self.arms, training or TrainingSettings(), training_state
        )
        self.prediction_audit = PredictionAudit(spec, self.arms)
        self.checks = EngineChecks(spec)
        reference_context = profile.kv_tokens_per_sequence if profile else 0.0
        self._context_by_batch = ContextByBatch(self._buckets, reference_context, settings)
        self._forced_arm: Arm | None = None
        self._is_stopping = False
        self._last_step = -1
        self.last_batch_size = 1
        self._epoch = 0
        # For the plan that is issued next.
        self._mixture_rules: tuple[MixtureRule, ...] = ()
        # The inputs of the plan's rows, which are made again only if these change.
        self._row_inputs: tuple[object, ...] | None = None
        self._plan_issued_at = 0.0
        self._evaluated_at, self._reports_at_evaluation = -float("inf"), 0
        is_cold = profile is None
        self._unsettled_until_report = (
            settings.unsettled_reports_cold if is_cold else settings.unsettled_reports
        )
        self.reports = 0
        self.warm_start = ""
        # The inputs of the last decision.
        self.decision: Decision
        self._plan: Plan
        now = clock.now()
        self._issue_plan(*self._decide_rows(now), self._describe_decision(), now)

    def _make_cost_model(self, profile: Profile | None) -> CostModel:
        padded = bool(self.spec.fingerprint.graph_batch_sizes)
        prior = None if profile else select_prior(self.spec, self.arms, self._buckets)
        return CostModel(
            self.arms, self._buckets, profile, self._settings, padded=padded, prior=prior
        )

    def _set_planner_rows(self) -> None:
        """Divides the plan into rows, and limits the planner to the arms that may run in each."""
        constraints = self._constraints = self._constrain_rows(self.overrides)
        self._planner.set_rows(
            constraints.upper_batch_sizes,
            constraints.feasible,
            constraints.possible,
            constraints.bounds,
        )

    def _constrain_rows(self, overrides: Iterable[Override]) -> RowConstraints:
        tpot_max_seconds = self._settings.tpot_ceiling_seconds
        return constrain_rows(overrides, self.spec, self._buckets, self.arms, tpot_max_seconds)

    @property
    def settings(self) -> PlannerSettings:
        """The planner's settings."""
        return self._settings

    @property
    def now(self) -> float:
        """Seconds of the controller's clock."""
        return self._clock.now()

    @property
    def profile_id(self) -> str:
        """Digest of the profile in use; "" while costs come from the prior."""
        return self.cost_model.profile_id

    @property
    def switches(self) -> int:
        """Number of changes of a bucket's arm so far."""
        return self._planner.switches

    def observe(self, report: StepReport) -> None:
        """Adds one report.  Raises StaleReportError or UnknownArmError without using any of it."""
        arm = self._usable_arm_index(report)
        batch_size, now = report.batch_size, self._clock.now()
        self._last_step = report.step
        self.last_batch_size = batch_size
        self.reports += 1
        is_measurement = self._forced_arm is not None
        self.checks.observe(report, is_measurement=is_measurement)
        # A measurement generates its own load, so its acceptance is no evidence about the traffic.
        if not is_measurement:
            self._observe_traffic(report, now)
        cell = arm, self.cost_model.bucket_of(batch_size)
        kv_per_sequence = report.kv_tokens / batch_size
        self._context_by_batch.observe(cell[1], kv_per_sequence)
        expected_seconds = self.cost_model.predict(arm, batch_size, report.kv_tokens)
        prefill_seconds = (
            self._prefill_price.predict_seconds(report.prefill_tokens)
            if report.prefill_tokens
            else 0.0
        )
        max_plausible_seconds = self._settings.wild_step_factor * (
            expected_seconds + prefill_seconds
        ) + self._catch_up_estimator.predict_seconds(report.drafter)
        woke_drafter = self._catch_up_estimator.observe(report, expected_seconds)
        self._prefill_price.count_prompt_tokens(report.prefill_tokens)
        flags = report.flags
        is_plain = not woke_drafter and (flags is NO_FLAGS or not flags.is_unusable_for_cost)
        if is_plain and report.prefill_tokens:
            is_plain = False
            # Once there is a price, prompts are not the cause of a step that is far above it.
            step_seconds = (
                min(report.step_seconds, max_plausible_seconds)
                if prefill_seconds
                else report.step_seconds
            )
            self._prefill_price.observe(report.prefill_tokens, step_seconds, expected_seconds)
        if is_plain and not self._observe_plain_step(
            report, cell, kv_per_sequence, expected_seconds
        ):
            # A probe is not charged for a slow step that has another cause.
            max_plausible_seconds = expected_seconds
        self.prediction_audit.observe(
            arm, report, expected_seconds if is_plain and not is_measurement else None
        )
        step_seconds = report.step_seconds
        if not is_measurement:
            self.updates.observe(report, expected_seconds)
            extra_seconds = self._switch_price.seconds if flags.switched else 0.0
            if woke_drafter:
                extra_seconds = min(
                    max(step_seconds - expected_seconds, 0.0), max_plausible_seconds
                )
            self._loss_account.observe(arm, batch_size, extra_seconds)
        shift_probability = self.traffic.state_tracker.hazard_estimator.shift_probability
        seconds = min(step_seconds, max_plausible_seconds)
        self.explorer.observe(report, seconds, shift_probability, now)

    def _observe_traffic(self, report: StepReport, now: float) -> None:
        if self.traffic.observe(report, now):
            unsettled_until = self.reports + self._settings.unsettled_reports
            self._unsettled_until_report = max(self._unsettled_until_report, unsettled_until)
            # The plan was made for other traffic.
            self._evaluated_at = -float("inf")
        self._planner.observe(report)
        self.mixture_estimators.observe(report)

    def _observe_plain_step(
        self,
        report: StepReport,
        cell: tuple[int, int],
        kv_per_sequence: float,
        expected_seconds: float,
    ) -> bool:
        """Adds the duration of a plain step; False if the cost model rejects it for now."""
        cost_model = self.cost_model
        if report.flags.switched and cost_model.is_known(cell):
            self._switch_price.observe(report.step_seconds, expected_seconds)
        seconds = self._switch_price.seconds_without_switch(report)
        if not report.probe_id and cost_model.is_new(cell[1]):
            # This step's cost may change the choice, so the plan is evaluated at once.
            self._evaluated_at = -float("inf")
        if seconds is None:
            return True
        is_believed = cost_model.observe(cell, kv_per_sequence, expected_seconds, seconds)
        self.checks.observe_step_time(report, seconds)
        return is_believed

    def _usable_arm_index(self, report: StepReport) -> int:
        """Returns the index of the report's arm.  Raises StaleReportError or UnknownArmError."""
        if report.step <= self._last_step:
            raise StaleReportError(
                f"step {report.step} does not follow step {self._last_step}: steps must increase"
            )
        arm = self._arm_index.get((report.drafter, report.gamma), -1)
        if arm < 0:
            self.spec.require_arm(report.arm)
        if report.groups or report.proposals:
            for group in report.groups:
                if group.drafter:
                    self.spec.drafter(group.drafter)
            for part in report.proposals:
                self.spec.drafter(part.drafter)
        return arm

    def set_overrides(self, overrides: Iterable[Override]) -> bool:
        """Replaces the overrides; returns True if that is a change for this engine."""
        applicable = overrides_for_engine(overrides, self.spec)
        if applicable == self.overrides:
            return False
        self.overrides = applicable
        self._set_planner_rows()
        self.explorer.cancel()
        self._evaluated_at = -float("inf")
        return True

    def record_lost_capabilities(
        self, lost_capabilities: Iterable[LostCapability]
    ) -> tuple[LostCapability, ...]:
        """Adds lost capabilities; returns those that were not lost before.

        Raises InvalidLossError, without adding any, for a capability that the engine never had.
        """
        lost_capabilities = tuple(lost_capabilities)
        require_introduced(lost_capabilities, self.spec)
        additional = newly_lost(self.spec, lost_capabilities)
        if not additional:
            return ()
        self.spec = replace(self.spec, lost=(*self.spec.lost, *additional))
        if (
            self._forced_arm is not None
            and self.spec.lost_capability_of(self._forced_arm) is not None
        ):
            self._forced_arm = None
        self._catch_up_estimator.use_capabilities(self.spec.remaining_capabilities)
        self.updates.use_capabilities(self.spec.remaining_capabilities)
        self._set_planner_rows()
        self.explorer.cancel()
        # The drafter may no longer sleep in rows with unchanged inputs.
        self._row_inputs = None
        self._evaluated_at = -float("inf")
        return additional

    def values_with_overrides(self, overrides: Iterable[Override]) -> tuple[RowConstraints, Values]:
        """Returns the rows and values of the last decision, but with these overrides."""
        constraints = self._constrain_rows(overrides)
        return constraints, self.decision.estimates.values_for_rows(
            self.arms, self._bucket_sizes, constraints
        )

    def next_plan(self) -> Plan | None:
        """Returns a new plan if it differs or half of the lease is used up, otherwise None."""
        now = self._clock.now()
        if not self.is_plan_due(now):
            return None
        is_lease_half_gone = self._is_lease_half_gone(now)
        rows, reason = self._decide_rows(now)
        constraints = self._constraints
        previous_plan, current_state = (
            self._plan,
            (constraints.override_ids, self._current_regime(), self.updates.version),
        )
        is_unchanged = (
            previous_plan.overrides,
            previous_plan.regime,
            previous_plan.draft_version,
        ) == current_state
        if (
            is_unchanged
            and rows == previous_plan.rows
            and self._mixture_rules == previous_plan.rules
        ):
            if not is_lease_half_gone:
                return None
            reason = Reason.LEASE if reason is Reason.EXPLOIT else reason
        return self._issue_plan(rows, reason, self._describe_decision(), now)

    def is_plan_due(self, now: float) -> bool:
        """Returns whether `next_plan` would make a (slow) decision at this time."""
        is_settled = self.reports > self._unsettled_until_report
        pause_share = 1.0 if is_settled else self._settings.unsettled_pause
        pause_seconds = self._settings.replan_seconds * pause_share
        pause_steps = self._settings.replan_steps * pause_share
        is_due = (
            now - self._evaluated_at >= pause_seconds
            or self.reports - self._reports_at_evaluation >= pause_steps
        )
        return is_due or self._is_lease_half_gone(now)

    def _is_lease_half_gone(self, now: float) -> bool:
        return now - self._plan_issued_at >= self._settings.lease_seconds / 2

    def current_plan(self) -> Plan:
        """The newest plan."""
        return self._plan

    def row_for_batch(self, batch_size: int) -> PlanRow:
        """Returns the newest plan's row for this batch size; a running probe replaces its arm."""
        row = self._plan.row_for(batch_size)
        if row.probe is None:
            return row
        return make_row(self.spec, row.max_batch_size, row.probe.arm, Reason.PROBE, row.probe)

    def force_arm(self, arm: Arm | None) -> Plan:
        """Issues a plan with this arm in every row, until `force_arm(None)` (profiling).

        Raises UnknownArmError, also for an arm that the engine has lost.
        """
        if arm is not None:
            self.spec.require_arm(arm)
            if (lost_capability := self.spec.lost_capability_of(arm)) is not None:
                raise UnknownArmError(
                    f"this engine has lost {lost_capability.description}: {lost_capability.reason}",
                    field_path="gamma",
                )
        self._forced_arm = arm
        self.explorer.cancel()
        now = self._clock.now()
        return self._issue_plan(*self._decide_rows(now), self._describe_decision(), now)

    def make_last_plan(self, lease_seconds: float) -> Plan:
        """Issues a final plan with a long lease, for an engine that will lose its sidecar.

        It has the present choices, but nothing that needs supervision: no probe, no measurement,
        and no drafter updates except those of an override.  No plan follows it.
        """
        self._forced_arm, self._is_stopping = None, True
        now = self._clock.now()
        rows = drop_probes(self.spec, self._decide_rows(now)[0])
        detail = f"the sidecar is stopping: hold this for {lease_seconds:g} s"
        plan = self._issue_plan(rows, Reason.LEASE, detail, now)
        self._plan = replace(plan, lease_seconds=lease_seconds)
        return self._plan

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Replaces the settings; estimates and choices are kept."""
        self.updates.use_settings(training)
        if settings == self._settings:
            return
        self._settings = settings
        for component in (
            self.traffic, self.mixture_estimators, self.cost_model, self._context_by_batch,
            self._catch_up_estimator, self._prefill_price, self._switch_price, self._loss_account,
            self.explorer,
        ):  # fmt: skip
            component.use_settings(settings)
        self._discount_rule = DiscountRule(self.arms, settings)
        previous_planner, self._planner = (
            self._planner,
            make_planner(self.arms, self._buckets, settings),
        )
        self._set_planner_rows()
        self._planner.choice, self._planner.proven = (
            previous_planner.choice,
            previous_planner.proven,
        )
        self._planner.switches = previous_planner.switches
        self._evaluated_at = -float("inf")

    def use_profile(self, profile: Profile) -> None:
        """Replaces the cost profile; acceptance is kept.  Raises ProfileMismatchError."""
        profile.require_match(self.spec.fingerprint, self.spec.drafters)
        self.cost_model = self._make_cost_model(profile)
        if profile.catch_up_seconds_per_token:
            self._catch_up_estimator.restart_from_price(profile.catch_up_seconds_per_token)
        self._evaluated_at = -float("inf")

    def warm_start_from(self, snapshots: Iterable[AcceptanceSnapshot], source: str) -> None:
        """Adds estimates of other sessions; source: where they come from, as text."""
        self.traffic.warm_start_from(snapshots)
        self.warm_start = source
        self._evaluated_at = -float("inf")

    def acceptance_snapshots(self) -> list[AcceptanceSnapshot]:
        """Returns the present acceptance estimates, for another session's warm start."""
        return self.traffic.acceptance_snapshots()

    def refresh_decision(self) -> None:
        """Makes the present estimates the inputs of the last decision.

        Needed after `checkpoint.restore` has replaced the controller's variables.
        """
        self.decision = self._make_decision(self.traffic.curves())

    def _make_decision(self, traffic: TrafficCurves) -> Decision:
        estimates = Estimates.collect(
            traffic,
            self.cost_model,
            self._catch_up_estimator,
            self._context_by_batch.by_bucket(),
            self._switch_price.seconds,
            self._prefill_price.mean_seconds_per_step,
        )
        values = estimates.values_for_rows(self.arms, self._bucket_sizes, self._constraints)
        return Decision(estimates, values, self._constraints, self.overrides, self.reports)

    def _decide_rows(self, now: float) -> tuple[tuple[PlanRow, ...], Reason]:
        """Updates the estimates from the reports since the last decision, and decides."""
        self._evaluated_at, self._reports_at_evaluation = now, self.reports
        self.cost_model.commit()
        decision = self.decision = self._make_decision(self.traffic.commit())
        previous_rules = self._plan.rules if self._epoch else ()
        self._mixture_rules = self.mixture_estimators.rules(
            decision.estimates.traffic.all_traffic, previous_rules
        )
        if self._forced_arm is not None:
            self._row_inputs = None
            rows = make_forced_rows(
                self.spec, self._constraints.upper_batch_sizes, self.arms, self._forced_arm
            )
            return rows, Reason.PROFILING
        values, shift_probabilities, constraints = (
            decision.values,
            self.traffic.shift_probabilities,
            decision.constraints,
        )
        uncertainty = decision.estimates.uncertainty
        proven = self._planner.update_proven(uncertainty)
        factors = None
        if self._planner.uses_discounts:
            factors = self._discount_rule.discounts(
                values, uncertainty, constraints.cost_buckets, proven
            )
        self._loss_account.commit(values, constraints, shift_probabilities)
        choices = self._planner.update(values, factors, self._loss_account.limits(values))
        if constraints.bounds:
            decision = self.decision = replace(decision, excluded=self._planner.pop_excluded())
        active_row = constraints.row_of(self.last_batch_size)
        self.prediction_audit.commit(values, constraints.row_of)
        can_observe = self.reports and not has_stopped_reporting(self.spec)
        if can_observe and self._planner.can_explore and constraints.limits[active_row].can_explore:
            situation = ProbeSituation(
                values, uncertainty, active_row, self.last_batch_size, choices[active_row],
                shift_probabilities, int(constraints.cost_buckets[active_row]),
                self._planner.probe_candidates(
                    values, active_row, self.explorer.gamma_zero_budget_share
                ),
                factors, self._loss_account.loss_budget_steps,
                self._loss_account.first_run_budget_steps,
            )  # fmt: skip
            self.explorer.start_probe_if_worthwhile(situation, now)
        if constraints.override_regime is None and self.reports:
            feasible = None if constraints.feasible is None else constraints.feasible[:, active_row]
            self.updates.update(values, active_row, self.last_batch_size, feasible)
        rows = self._make_rows(choices)
        return rows, plan_reason(
            self._planner.reasons[active_row], self.cost_model.prior, self._probe
        )

    @property
    def _probe(self) -> Probe | None:
        """The running probe."""
        running_probe = self.explorer.running_probe
        return running_probe[1] if running_probe else None

    def _describe_decision(self) -> str:
        """Describes the last decision as text."""
        if self._forced_arm is not None:
            return f"measuring {self._forced_arm.drafter} at gamma {self._forced_arm.gamma}"
        assert self._planner.choice is not None
        active_row = self._constraints.row_of(self.last_batch_size)
        return describe_decision(
            self.decision, self.arms, self.last_batch_size, self._planner.choice[active_row],
            self.cost_model.prior, self._probe, self.explorer.purpose,
        )  # fmt: skip

    def _make_rows(self, choices: Sequence[int]) -> tuple[PlanRow, ...]:
        """Returns the rows, and reuses those of the last plan that have not changed."""
        constraints, shared_probe = self._constraints, None
        running_probe = self.explorer.running_probe
        if running_probe is not None:
            row, probe = running_probe
            feasible_rows = (
                None
                if constraints.feasible is None
                else constraints.feasible[self.arms.index(probe.arm)]
            )
            shared_probe = (
                rows_for_probe(constraints.upper_batch_sizes, choices, row, feasible_rows),
                probe,
            )
        previous_rows = self._plan.rows if self._row_inputs is not None else ()
        row_inputs = (
            constraints.upper_batch_sizes,
            [*choices],
            self._planner.reasons,
            shared_probe,
        )
        if row_inputs == self._row_inputs:
            return previous_rows
        self._row_inputs = row_inputs
        chosen_arms = [self.arms[arm] for arm in choices]
        return make_rows(
            self.spec,
            constraints.upper_batch_sizes,
            chosen_arms,
            self._planner.reasons,
            shared_probe,
            previous_rows,
        )

    def _current_regime(self) -> Regime:
        """Returns the overrides' regime, otherwise the decided one, or off while measuring."""
        if self._constraints.override_regime is not None:
            return self._constraints.override_regime
        return Regime() if self._forced_arm or self._is_stopping else self.updates.regime

    def _issue_plan(
        self, rows: tuple[PlanRow, ...], reason: Reason, detail: str, now: float
    ) -> Plan:
        self._epoch += 1
        self._plan_issued_at = now
        lease_seconds, override_ids = self._settings.lease_seconds, self._constraints.override_ids
        regime, draft_version = self._current_regime(), self.updates.version
        self._plan = Plan(
            self._epoch,
            rows,
            regime,
            lease_seconds,
            reason,
            detail,
            override_ids,
            draft_version,
            self._mixture_rules,
        )
        self.checks.expect_plan(self._plan)
        return self._plan
