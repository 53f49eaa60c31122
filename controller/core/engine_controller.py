"""One engine's decision loop: reports in, plans out.

    report -> acceptance, cost, exploration account -> (at most every `replan_seconds`)
    values -> choice with hysteresis -> perhaps a probe -> plan, if anything changed

The only state is in this object; the only clock is the one passed in.  Feed a second one the same
reports at the same times and it makes the same plans.
"""

from collections.abc import Sequence

from controller.core.acceptance import AcceptanceEstimator
from controller.core.clock import Clock
from controller.core.cost import CostModel
from controller.core.errors import StaleReportError
from controller.core.exploration import Explorer
from controller.core.planner import Planner, Values, batch_buckets
from controller.core.profile import Profile
from controller.core.settings import PlannerSettings
from controller.core.types import (
    Arm,
    ArmValue,
    EngineSpec,
    Explanation,
    Plan,
    PlanRow,
    PositionEstimate,
    Probe,
    Reason,
    Regime,
    StepReport,
)

_KV_RATE = 0.05


class EngineController:
    """Estimates and plans for one introduced engine.

    Raises ProfileMismatchError when `profile` belongs to another fingerprint.
    """

    def __init__(
        self, spec: EngineSpec, settings: PlannerSettings, profile: Profile | None, clock: Clock
    ) -> None:
        if profile is not None:
            profile.require_match(spec.fingerprint, spec.drafters)
        self.spec = spec
        self._settings = settings
        self._clock = clock
        self.arms = tuple(Arm(d.name, gamma) for d in spec.drafters for gamma in d.gammas)
        self._buckets = batch_buckets(spec.max_batch_size, spec.fingerprint.graph_batch_sizes)
        self.acceptance = {
            d.name: AcceptanceEstimator(d.gammas[-1], settings) for d in spec.drafters
        }
        self.cost = CostModel(self.arms, self._buckets, profile, settings)
        self._planner = Planner(self.arms, self._buckets, settings)
        self.explorer = Explorer(settings)
        self._forced: Arm | None = None
        self._kv_per_sequence = profile.kv_tokens_per_sequence if profile else 0.0
        self._last_step = -1
        self._last_batch = 1
        self._epoch = 0
        self._plan: Plan | None = None
        self._plan_time = 0.0
        self._evaluated_at = -float("inf")
        self.reports = 0

    @property
    def profile_id(self) -> str:
        """Digest of the profile in use; "" while costs come from the prior."""
        return self.cost.profile_id

    @property
    def switches(self) -> int:
        """Changes of a bucket's arm so far."""
        return self._planner.switches

    def observe(self, report: StepReport) -> None:
        """Folds one report.  Raises StaleReportError or UnknownArmError; nothing is used then."""
        if report.step <= self._last_step:
            raise StaleReportError(
                f"step {report.step} does not follow step {self._last_step}: steps must go forward"
            )
        self.spec.require(report.arm)
        self._last_step = report.step
        self._last_batch = report.batch_size
        self.reports += 1
        # A measurement brings its own load: what it accepts says nothing about the traffic.
        if self._forced is None:
            self._fold_acceptance(report)
        kv_per_sequence = report.kv_tokens / report.batch_size
        self._kv_per_sequence += _KV_RATE * (kv_per_sequence - self._kv_per_sequence)
        if not report.flags.distorts_cost:
            self.cost.observe(report.arm, report.batch_size, report.kv_tokens, report.step_seconds)
        self.explorer.observe(report, self._clock.now())

    def _fold_acceptance(self, report: StepReport) -> None:
        for name, estimator in self.acceptance.items():
            if name == report.drafter:
                estimator.fold(report.accepted_counts)
            else:
                estimator.fade(report.batch_size)

    def next_plan(self) -> Plan | None:
        """A new plan if one is due (changed, a probe, or the lease half gone), else None."""
        now = self._clock.now()
        if self._plan is None:
            return self.current_plan()
        half_gone = now - self._plan_time >= self._settings.lease_seconds / 2
        if now - self._evaluated_at < self._settings.replan_seconds and not half_gone:
            return None
        rows, reason, detail = self._decide_rows(now)
        if rows == self._plan.rows:
            if not half_gone:
                return None
            reason = Reason.LEASE if reason is Reason.EXPLOIT else reason
        return self._issue(rows, reason, detail, now)

    def current_plan(self) -> Plan:
        """The newest plan, made now if there is none."""
        if self._plan is None:
            now = self._clock.now()
            self._issue(*self._decide_rows(now), now)
        assert self._plan is not None
        return self._plan

    def decide(self, batch_size: int) -> PlanRow:
        """The row for this batch size, with a probe under way in its place."""
        row = self.current_plan().row_for(batch_size)
        if row.probe is None:
            return row
        return PlanRow(
            row.max_batch_size, row.probe.arm, Reason.PROBE, row.probe,
            self._asleep(row.probe.arm),
        )  # fmt: skip

    def force(self, arm: Arm | None) -> Plan:
        """Every row this arm until `force(None)` (profiling).  Raises UnknownArmError."""
        if arm is not None:
            self.spec.require(arm)
        self._forced = arm
        self.explorer.cancel()
        now = self._clock.now()
        return self._issue(*self._decide_rows(now), now)

    def use_profile(self, profile: Profile) -> None:
        """Puts a profile into use; acceptance is kept.  Raises ProfileMismatchError."""
        profile.require_match(self.spec.fingerprint, self.spec.drafters)
        self.cost = CostModel(self.arms, self._buckets, profile, self._settings)
        self._evaluated_at = -float("inf")

    def explain(self, batch_size: int = 0) -> Explanation:
        """The decision row at a batch size (0: the last report's), with all its numbers."""
        batch_size = batch_size or self._last_batch
        bucket = self.cost.bucket_of(batch_size)
        values = self._evaluate()
        plan = self.current_plan()
        chosen = plan.row_for(batch_size).arm
        column = values.value[:, bucket]
        ranked = sorted(column, reverse=True)
        margin = ranked[0] / ranked[1] - 1 if len(ranked) > 1 else 0.0
        return Explanation(
            engine_id=self.spec.engine_id,
            batch_size=batch_size,
            plan=plan,
            arms=tuple(
                ArmValue(
                    arm,
                    float(values.expected[i]),
                    float(values.costs.seconds[i, bucket]),
                    float(column[i]),
                    float(values.optimistic_value[i, bucket]),
                    arm == chosen,
                    bool(values.costs.extrapolated[i, bucket]),
                )
                for i, arm in enumerate(self.arms)
            ),
            positions=self._positions(),
            profile_id=self.profile_id,
            margin=float(margin),
            probe_share=self.explorer.probe_share,
            kv_tokens_per_sequence=self._kv_per_sequence,
        )

    def _positions(self) -> tuple[PositionEstimate, ...]:
        found: list[PositionEstimate] = []
        for name, estimator in self.acceptance.items():
            means, exposures = estimator.conditional()
            found += [
                PositionEstimate(name, k + 1, float(means[k]), float(exposures[k]))
                for k in range(estimator.gamma_max)
            ]
        return tuple(found)

    def _evaluate(self) -> Values:
        return self._planner.evaluate(self.acceptance, self.cost, self._kv_per_sequence)

    def _decide_rows(self, now: float) -> tuple[tuple[PlanRow, ...], Reason, str]:
        if self._forced is not None:
            detail = f"measuring {self._forced.drafter} at gamma {self._forced.gamma}"
            rows = [self._row(b, self._forced, Reason.PROFILING, None) for b in self._buckets]
            return tuple(rows), Reason.PROFILING, detail
        self._evaluated_at = now
        values = self._evaluate()
        choice = self._planner.update(values)
        active = self.cost.bucket_of(self._last_batch)
        if self.reports:
            self.explorer.consider(
                self.arms,
                values,
                active,
                self._last_batch,
                choice[active],
                now,
            )
        probing = self.explorer.running
        rows = [
            self._row(
                size,
                self.arms[choice[j]],
                self._planner.reasons[j],
                probing[1] if probing and probing[0] == j else None,
            )
            for j, size in enumerate(self._buckets)
        ]
        return tuple(rows), *self._why(values, choice, active, probing)

    def _why(
        self,
        values: Values,
        choice: Sequence[int],
        active: int,
        probing: tuple[int, Probe] | None,
    ) -> tuple[Reason, str]:
        arm = self.arms[choice[active]]
        detail = (
            f"B={self._last_batch}: {arm.drafter} gamma {arm.gamma}, "
            f"{values.value[choice[active], active]:.0f} tok/s expected"
        )
        if not self.profile_id:
            detail += "; costs from the prior, no profile loaded"
        if probing:
            probe = probing[1]
            return Reason.PROBE, (
                f"{detail}; {probe.steps} steps of {probe.arm.drafter} gamma {probe.arm.gamma} "
                "to learn"
            )
        if not self.profile_id:
            return Reason.PROFILE_MISSING, detail
        return self._planner.reasons[active], detail

    def _row(self, size: int, arm: Arm, reason: Reason, probe: Probe | None) -> PlanRow:
        asleep = self._asleep(arm) or (probe is not None and self._asleep(probe.arm))
        return PlanRow(size, arm, reason, probe, asleep)

    def _asleep(self, arm: Arm) -> bool:
        return arm.gamma == 0 and self.spec.capabilities.can_sleep

    def _issue(self, rows: tuple[PlanRow, ...], reason: Reason, detail: str, now: float) -> Plan:
        self._epoch += 1
        self._plan_time = now
        self._plan = Plan(self._epoch, rows, Regime(), self._settings.lease_seconds, reason, detail)
        return self._plan
