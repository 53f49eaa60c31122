"""One engine's decision loop: reports in, plans out.

    report -> acceptance, cost, catch-up, exploration account -> (at most every `replan_seconds`)
    values -> choice with hysteresis -> perhaps a probe -> plan, if anything changed

The only state is in this object; the only clock is the one passed in.  A second controller with the
same reports at the same times makes the same plans.

Two things change it: its inputs (`observe`, `set_overrides`, `force`, ...) and decisions
(`next_plan`, `force`, `last_plan`).  `current_plan`, `decide`, `decision`, `values_under` and
`beliefs` only read it, and may be called at any time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from controller.core.acceptance.by_class import TrafficCurves, TrafficEstimator
from controller.core.acceptance.mixtures import Mixtures
from controller.core.acceptance.warm_start import Belief
from controller.core.checks.engine_checks import EngineChecks
from controller.core.clock import Clock
from controller.core.cost.catch_up_cost import CatchUp
from controller.core.cost.live_estimates import ContextByBatch, PrefillPrice, SwitchPrice
from controller.core.cost.model import CostModel
from controller.core.cost.profile import Profile
from controller.core.cost.table import prior_for
from controller.core.engine.decision import Decision, Estimates, why
from controller.core.engine.prediction_audit import PredictionAudit
from controller.core.engine_spec import (
    Arm,
    EngineSpec,
    LostCapability,
    added,
    is_blind,
    kept_together,
    require_known,
)
from controller.core.errors import StaleReportError, UnknownArmError
from controller.core.plan import MixtureRule, Plan, PlanRow, Probe, Reason, Regime
from controller.core.planning.baseline_planners import make_planner
from controller.core.planning.constraints import PlanRows, covering, rows_under
from controller.core.planning.doubt import discounts
from controller.core.planning.exploration import Explorer, Situation
from controller.core.planning.loss_account import LossAccount
from controller.core.planning.observation_cost import budget
from controller.core.planning.overrides import Override
from controller.core.planning.plan_table import (
    batch_buckets,
    forced_rows,
    reach,
    row_of,
    rows_of,
    without_probes,
)
from controller.core.planning.planner import Values
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training.drafter_updates import DrafterUpdates
from controller.core.training.selective_training import TrainingSettings, TrainingState

# If a step takes more than this multiple of its expected time, its arm is not the cause.
_WILD_STEP = 3.0
# At the start and after a shift estimates change quickly: for this many reports, plans are made
# after a share (`_UNSETTLED_PAUSE`) of the usual pause.
_UNSETTLED_REPORTS = 30
# The same without a profile, where all costs have to be learnt first.
_UNSETTLED_REPORTS_COLD = 500
_UNSETTLED_PAUSE = 0.2


@recorded(
    "controller",
    "reports traffic mixtures cost explorer updates _catch_up _context _decided _epoch "
    "_evaluated_at _evaluated_reports _forced last_batch _last_step _losses _parting _plan "
    "_plan_time _planner _prefill _switch_price _unsettled_until warm_start",
)
class EngineController:
    """Estimates and plans for one introduced engine.  The first plan is made at once.

    overrides: active from the first plan on; those for other engines are ignored.  trained: the
    stored state of its drafter's training.  Raises ProfileMismatchError if `profile` belongs to
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
        trained: TrainingState | None = None,
    ) -> None:
        if profile is not None:
            profile.require_match(spec.fingerprint, spec.drafters)
        self.spec = spec
        self._settings = settings
        self._clock = clock
        self.arms = spec.arms
        self._arm_index = {(arm.drafter, arm.gamma): i for i, arm in enumerate(self.arms)}
        graphs = spec.fingerprint.graph_batch_sizes
        self._buckets = batch_buckets(spec.max_batch_size, graphs, len(self.arms))
        self._sizes = np.asarray(self._buckets, dtype=np.float64)
        self.traffic = TrafficEstimator(spec.drafters, settings)
        self.mixtures = Mixtures(spec.drafters, settings)
        self.cost = self._cost_model(profile)
        self._catch_up = CatchUp(
            [d.name for d in spec.drafters],
            profile.catch_up_seconds_per_token if profile else 0.0,
            spec.able,
            kept_together(spec.drafters),
        )
        self._switch_price = SwitchPrice()
        self._prefill = PrefillPrice()
        self._losses = LossAccount(self.arms)
        self._planner = make_planner(self.arms, self._buckets, settings)
        # The overrides for this engine, at any batch size.
        self.overrides = covering(overrides, spec)
        self._limit_planner()
        self.explorer = Explorer(self.arms, settings, spec.capabilities.draft_lag)
        self.updates = DrafterUpdates(spec, self.arms, training or TrainingSettings(), trained)
        self.prediction_audit = PredictionAudit(spec, self.arms)
        self.checks = EngineChecks(spec)
        reference = profile.kv_tokens_per_sequence if profile else 0.0
        self._context = ContextByBatch(self._buckets, reference)
        self._forced: Arm | None = None
        self._parting = False
        self._last_step = -1
        self.last_batch = 1
        self._epoch = 0
        # For the plan that is issued next.
        self._rules: tuple[MixtureRule, ...] = ()
        # The inputs of the plan's rows, which are made again only if these change.
        self._decided: tuple[object, ...] | None = None
        self._plan_time = 0.0
        self._evaluated_at, self._evaluated_reports = -float("inf"), 0
        cold = profile is None
        self._unsettled_until = _UNSETTLED_REPORTS_COLD if cold else _UNSETTLED_REPORTS
        self.reports = 0
        self.warm_start = ""
        # The inputs of the last decision.
        self.decision: Decision
        self._plan: Plan
        now = clock.now()
        self._issue(*self._decide_rows(now), now)

    def _cost_model(self, profile: Profile | None) -> CostModel:
        padded = bool(self.spec.fingerprint.graph_batch_sizes)
        prior = None if profile else prior_for(self.spec, self.arms, self._buckets)
        return CostModel(
            self.arms, self._buckets, profile, self._settings, padded=padded, prior=prior
        )

    def _limit_planner(self) -> None:
        """Divides the plan into rows, and limits the planner to the arms that may run in each."""
        at = self._rows_at = self._rows_under(self.overrides)
        sizes = self._sizes[at.bucket]
        self._planner.limit(at.upper, sizes, at.feasible, at.possible, at.bounds)

    def _rows_under(self, overrides: Iterable[Override]) -> PlanRows:
        ceiling = self._settings.tpot_ceiling_seconds
        return rows_under(overrides, self.spec, self._buckets, self.arms, ceiling)

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
        return self.cost.profile_id

    @property
    def switches(self) -> int:
        """Number of changes of a bucket's arm so far."""
        return self._planner.switches

    def observe(self, report: StepReport) -> None:
        """Adds one report.  Raises StaleReportError or UnknownArmError without using any of it."""
        arm = self._require_usable(report)
        self._last_step = report.step
        self.last_batch = report.batch_size
        self.reports += 1
        self.checks.observe(report, measured=self._forced is not None)
        # A measurement generates its own load, so its acceptance is no evidence about the traffic.
        if self._forced is None:
            if self.traffic.fold(report, self._clock.now()):
                until = self.reports + _UNSETTLED_REPORTS
                self._unsettled_until = max(self._unsettled_until, until)
                # The plan was made for other traffic.
                self._evaluated_at = -float("inf")
            self._planner.observe(report)
            self.mixtures.fold(report)
        bucket = self.cost.bucket_of(report.batch_size)
        self._context.observe(bucket, report.kv_tokens / report.batch_size)
        expected = self.cost.predict(arm, report.batch_size, report.kv_tokens)
        prompts = self._prefill.seconds_of(report.prefill_tokens)
        bearable = _WILD_STEP * (expected + prompts) + self._catch_up.seconds_of(report.drafter)
        woke = self._catch_up.observe(report, expected)
        self._prefill.count(report.prefill_tokens)
        plain = not (woke or report.flags.distorts_cost)
        if plain and report.prefill_tokens:
            plain = False
            # Once there is a price, prompts are not the cause of a step that is far above it.
            took = min(report.step_seconds, bearable) if prompts else report.step_seconds
            self._prefill.observe(report.prefill_tokens, took, expected)
        if plain:
            if report.flags.switched and self.cost.is_known(arm, report.batch_size):
                self._switch_price.observe(report.step_seconds, expected)
            seconds = self._switch_price.without(report)
            if not report.probe_id and self.cost.is_new(report.batch_size):
                # This step's cost may change the choice, so the plan is evaluated at once.
                self._evaluated_at = -float("inf")
            if seconds is not None:
                believed = self.cost.observe(
                    arm, report.batch_size, report.kv_tokens, expected, seconds
                )
                # A probe is not charged for a slow step that has another cause.
                bearable = bearable if believed else expected
                self.checks.time(report, seconds)
        self.prediction_audit.observe(
            arm, report, expected if plain and self._forced is None else None
        )
        if self._forced is None:
            self.updates.observe(report, expected)
            extra = self._switch_price.seconds if report.flags.switched else 0.0
            if woke:
                extra = min(max(report.step_seconds - expected, 0.0), bearable)
            self._losses.observe(arm, report.batch_size, extra)
        observation = self._planner.observation
        if observation is not None and report.gamma == 0:
            share = float(observation.share[self._rows_at.row_of(report.batch_size)])
        else:
            share = budget(self._settings, self.traffic.states.hazards.expected)
        seconds = min(report.step_seconds, bearable)
        self.explorer.observe(report, seconds, share, self._clock.now())

    def _require_usable(self, report: StepReport) -> int:
        """Returns the index of the report's arm.  Raises StaleReportError or UnknownArmError."""
        if report.step <= self._last_step:
            raise StaleReportError(
                f"step {report.step} does not follow step {self._last_step}: steps must increase"
            )
        arm = self._arm_index.get((report.drafter, report.gamma), -1)
        if arm < 0:
            self.spec.require(report.arm)
        for group in report.groups:
            if group.drafter:
                self.spec.drafter(group.drafter)
        for part in report.proposals:
            self.spec.drafter(part.drafter)
        return arm

    def set_overrides(self, overrides: Iterable[Override]) -> bool:
        """Replaces the overrides; returns True if that is a change for this engine."""
        mine = covering(overrides, self.spec)
        if mine == self.overrides:
            return False
        self.overrides = mine
        self._limit_planner()
        self.explorer.cancel()
        self._evaluated_at = -float("inf")
        return True

    def lose(self, losses: Iterable[LostCapability]) -> tuple[LostCapability, ...]:
        """Adds lost capabilities; returns those that were not lost before.

        Raises InvalidLossError, without adding any, for a capability that the engine never had.
        """
        losses = tuple(losses)
        require_known(losses, self.spec)
        news = added(self.spec, losses)
        if not news:
            return ()
        self.spec = replace(self.spec, lost=(*self.spec.lost, *news))
        if self._forced is not None and self.spec.loss_of(self._forced) is not None:
            self._forced = None
        self._catch_up.use_capabilities(self.spec.able)
        self.updates.use_capabilities(self.spec.able)
        self._limit_planner()
        self.explorer.cancel()
        # The drafter may no longer sleep in rows with unchanged inputs.
        self._decided = None
        self._evaluated_at = -float("inf")
        return news

    def values_under(self, overrides: Iterable[Override]) -> tuple[PlanRows, Values]:
        """Returns the rows and values of the last decision, but with these overrides."""
        at = self._rows_under(overrides)
        return at, self.decision.estimates.values(self.arms, self._sizes, at)

    def next_plan(self) -> Plan | None:
        """Returns a new plan if it differs or half of the lease is used up, otherwise None."""
        now = self._clock.now()
        if not self.is_plan_due(now):
            return None
        half_gone = self._lease_is_half_gone(now)
        rows, reason, detail = self._decide_rows(now)
        at = self._rows_at
        said, now_is = self._plan, (at.named, self._regime_now(), self.updates.version)
        same = (said.overrides, said.regime, said.draft_version) == now_is
        if same and rows == said.rows and self._rules == said.rules:
            if not half_gone:
                return None
            reason = Reason.LEASE if reason is Reason.EXPLOIT else reason
        return self._issue(rows, reason, detail, now)

    def is_plan_due(self, now: float) -> bool:
        """Returns whether `next_plan` would make a (slow) decision at this time."""
        settled = self.reports > self._unsettled_until
        pause = self._settings.replan_seconds * (1.0 if settled else _UNSETTLED_PAUSE)
        steps = self._settings.replan_steps * (1.0 if settled else _UNSETTLED_PAUSE)
        due = now - self._evaluated_at >= pause or self.reports - self._evaluated_reports >= steps
        return due or self._lease_is_half_gone(now)

    def _lease_is_half_gone(self, now: float) -> bool:
        return now - self._plan_time >= self._settings.lease_seconds / 2

    def current_plan(self) -> Plan:
        """The newest plan."""
        return self._plan

    def decide(self, batch_size: int) -> PlanRow:
        """Returns the newest plan's row for this batch size; a running probe replaces its arm."""
        row = self._plan.row_for(batch_size)
        if row.probe is None:
            return row
        return row_of(self.spec, row.max_batch_size, row.probe.arm, Reason.PROBE, row.probe)

    def force(self, arm: Arm | None) -> Plan:
        """Issues a plan with this arm in every row, until `force(None)` (profiling).

        Raises UnknownArmError, also for an arm that the engine has lost.
        """
        if arm is not None:
            self.spec.require(arm)
            if (loss := self.spec.loss_of(arm)) is not None:
                raise UnknownArmError(
                    f"this engine has lost {loss.what}: {loss.reason}", field_path="gamma"
                )
        self._forced = arm
        self.explorer.cancel()
        now = self._clock.now()
        return self._issue(*self._decide_rows(now), now)

    def last_plan(self, lease_seconds: float) -> Plan:
        """Issues a final plan with a long lease, for an engine that will lose its sidecar.

        It has the present choices, but nothing that needs supervision: no probe, no measurement,
        and no drafter updates except those of an override.  No plan follows it.
        """
        self._forced, self._parting = None, True
        now = self._clock.now()
        rows = without_probes(self.spec, self._decide_rows(now)[0])
        detail = f"the sidecar is stopping: hold this for {lease_seconds:g} s"
        plan = self._issue(rows, Reason.LEASE, detail, now)
        self._plan = replace(plan, lease_seconds=lease_seconds)
        return self._plan

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Replaces the settings; estimates and choices are kept."""
        self.updates.use_settings(training)
        if settings == self._settings:
            return
        self._settings = settings
        for part in (self.traffic, self.mixtures, self.cost, self.explorer):
            part.use_settings(settings)
        before, self._planner = self._planner, make_planner(self.arms, self._buckets, settings)
        self._limit_planner()
        self._planner.choice, self._planner.proven = before.choice, before.proven
        self._planner.switches = before.switches
        self._evaluated_at = -float("inf")

    def use_profile(self, profile: Profile) -> None:
        """Replaces the cost profile; acceptance is kept.  Raises ProfileMismatchError."""
        profile.require_match(self.spec.fingerprint, self.spec.drafters)
        self.cost = self._cost_model(profile)
        if profile.catch_up_seconds_per_token:
            self._catch_up.use(profile.catch_up_seconds_per_token)
        self._evaluated_at = -float("inf")

    def begin_from(self, beliefs: Iterable[Belief], where: str) -> None:
        """Adds estimates of other sessions; where: their source, as text."""
        self.traffic.begin_from(beliefs)
        self.warm_start = where
        self._evaluated_at = -float("inf")

    def beliefs(self) -> list[Belief]:
        """Returns the present acceptance estimates, for another session's warm start."""
        return self.traffic.beliefs()

    def take_estimates(self) -> None:
        """Makes the present estimates the inputs of the last decision.

        Needed after `checkpoint.restore` has replaced the controller's variables.
        """
        self.decision = self._assessed(self.traffic.curves())

    def _assessed(self, traffic: TrafficCurves) -> Decision:
        estimates = Estimates.of(
            traffic,
            self.cost,
            self._catch_up,
            self._context.by_bucket(),
            self._switch_price.seconds,
            self._prefill.seconds_a_step,
        )
        values = estimates.values(self.arms, self._sizes, self._rows_at)
        return Decision(estimates, values, self._rows_at, self.overrides, self.reports)

    def _decide_rows(self, now: float) -> tuple[tuple[PlanRow, ...], Reason, str]:
        """Updates the estimates from the reports since the last decision, and decides."""
        self._evaluated_at, self._evaluated_reports = now, self.reports
        self.cost.learn()
        made = self.decision = self._assessed(self.traffic.believe())
        before = self._plan.rules if self._epoch else ()
        self._rules = self.mixtures.rules(made.estimates.traffic.drafters, before)
        if self._forced is not None:
            self._decided = None
            detail = f"measuring {self._forced.drafter} at gamma {self._forced.gamma}"
            rows = forced_rows(self.spec, self._rows_at.upper, self.arms, self._forced)
            return rows, Reason.PROFILING, detail
        values, hazard, at = made.values, self.traffic.hazard, made.at
        doubt = made.estimates.uncertainty
        proven = self._planner.prove(doubt.arms_that_ran())
        hedge = None
        if self._planner.is_cautious:
            hedge = discounts(values, doubt, self.arms, at.bucket, proven)
        self._losses.settle(values, at, hazard)
        choice = self._planner.update(values, hazard, hedge, self._losses.limits(values))
        if at.bounds:
            made = self.decision = replace(made, excluded=self._planner.take_excluded())
        active = at.row_of(self.last_batch)
        self.prediction_audit.settle(values, at.row_of)
        sees = self.reports and not is_blind(self.spec)
        if sees and self._planner.explores and at.limits[active].explore:
            situation = Situation(
                values, doubt, active, self.last_batch, choice[active],
                self._planner.observation, 1 / hazard.expected,
                int(at.bucket[active]), self._planner.may_probe(values, active),
                self._losses.room, self._losses.room_for_news,
            )  # fmt: skip
            self.explorer.consider(situation, now)
        if at.regime is None and self.reports:
            feasible = None if at.feasible is None else at.feasible[:, active]
            self.updates.update(values, active, self.last_batch, feasible)
        probing = self.explorer.running
        rows = self._rows(choice, probing)
        chosen, prior = choice[active], "" if self.profile_id else self.cost.prior
        return rows, *why(
            made, self.arms, self.last_batch, chosen, self._planner.reasons[active], prior,
            probing[1] if probing else None, self.explorer.purpose,
        )  # fmt: skip

    def _rows(
        self, choice: Sequence[int], probing: tuple[int, Probe] | None
    ) -> tuple[PlanRow, ...]:
        """Returns the rows, and reuses those of the last plan that have not changed."""
        at, shared = self._rows_at, None
        if probing is not None:
            bucket, probe = probing
            able = None if at.feasible is None else at.feasible[self.arms.index(probe.arm)]
            shared = reach(at.upper, choice, bucket, able), probe
        kept = self._plan.rows if self._decided is not None else ()
        decided = (at.upper, [*choice], self._planner.reasons, shared)
        if decided == self._decided:
            return kept
        self._decided = decided
        chosen = [self.arms[arm] for arm in choice]
        return rows_of(self.spec, at.upper, chosen, self._planner.reasons, shared, kept)

    def _regime_now(self) -> Regime:
        """Returns the overrides' regime, otherwise the decided one, or off while measuring."""
        if self._rows_at.regime is not None:
            return self._rows_at.regime
        return Regime() if self._forced or self._parting else self.updates.regime

    def _issue(self, rows: tuple[PlanRow, ...], reason: Reason, detail: str, now: float) -> Plan:
        self._epoch += 1
        self._plan_time = now
        lease, named = self._settings.lease_seconds, self._rows_at.named
        regime, version = self._regime_now(), self.updates.version
        self._plan = Plan(
            self._epoch, rows, regime, lease, reason, detail, named, version, self._rules
        )
        self.checks.expect(self._plan)
        return self._plan
