"""Estimates what another rule, profile or constant would have done with recorded reports.

The changed core starts from the recorded one's estimates, gets the same reports at the same times,
and decides when the recorded one decided.  It learns only from steps that ran: draft positions
beyond the recorded draft length, and the step times of arms that did not run, are unobserved.  The
gain is therefore an estimate:

    tokens per second = sum of B (1 + E[accepted | gamma]) / sum of C(drafter, gamma, B, kv)

over the recorded steps.  E and C are the recorded configuration's estimates at that time, for both
choices.  Probes are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.core.acceptance.estimator import AcceptanceCurve
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from controller.core.plan import Plan, Reason
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.recording.recording import Opening, RecordedEvent
from controller.recording.replay import ReplayClock, apply_checked, rebuild_core
from controller.recording.segments import RecordingError

# A position with fewer observations counts as unobserved.
_EXPOSURES_MIN = 8.0
# Number of stretches that are kept; further ones are only counted.
_STRETCHES_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class CounterfactualChange:
    """The changes to the recorded run, at least one.

    constants: of the planner, by name.
    """

    constants: Mapping[str, object] = field(default_factory=dict)
    profile: Profile | None = None

    def settings(self, recorded: PlannerSettings) -> PlannerSettings:
        """Returns the changed settings.  Raises RecordingError for invalid constants."""
        try:
            return replace(recorded, **self.constants)  # type: ignore[arg-type]  # checked inside
        except (TypeError, ValueError) as error:
            raise RecordingError(f"the planner's constants: {error}") from error


@dataclass(slots=True)
class Totals:
    """Sums over some steps: estimates for the recorded and for the changed plan.

    unseen: number of steps in which the changed arm drafts unobserved positions.
    """

    steps: int = 0
    unseen: int = 0
    recorded_tokens: float = 0.0
    recorded_seconds: float = 0.0
    other_tokens: float = 0.0
    other_seconds: float = 0.0

    @property
    def recorded_rate(self) -> float:
        """Estimated tokens per second of the recorded plans; 0 before any step."""
        return self.recorded_tokens / self.recorded_seconds if self.recorded_seconds else 0.0

    @property
    def other_rate(self) -> float:
        """Estimated tokens per second of the changed plans; 0 before any step."""
        return self.other_tokens / self.other_seconds if self.other_seconds else 0.0

    @property
    def gain(self) -> float:
        """Ratio of the changed rate to the recorded one, minus 1; 0 before any step."""
        return self.other_rate / self.recorded_rate - 1 if self.recorded_rate else 0.0

    def add(self, recorded: tuple[float, float], other: tuple[float, float]) -> None:
        """Adds a step.  recorded, other: (tokens, seconds) with each plan."""
        self.steps += 1
        self.recorded_tokens += recorded[0]
        self.recorded_seconds += recorded[1]
        self.other_tokens += other[0]
        self.other_seconds += other[1]


@dataclass(slots=True, kw_only=True)
class DifferingStretch(Totals):
    """Consecutive steps for which the changed core chooses another arm.

    wall_seconds: Unix time of the first step.  seconds: sum over all.  reason: of the row in the
    changed plan.
    """

    wall_seconds: float
    recorded: Arm
    other: Arm
    reason: str
    seconds: float = 0.0
    batch_min: int
    batch_max: int = 0


@dataclass(slots=True)
class Comparison(Totals):
    """Sums over all steps.  measured: steps of a profile measurement, left out of the sums."""

    measured: int = 0
    differing: int = 0
    observed_tokens: int = 0
    observed_seconds: float = 0.0
    stretches: list[DifferingStretch] = field(default_factory=list)
    more_stretches: int = 0

    @property
    def differing_share(self) -> float:
        """Share of steps for which the changed plan has another arm."""
        return self.differing / self.steps if self.steps else 0.0

    @property
    def observed_rate(self) -> float:
        """Reported tokens per second, probes included."""
        return self.observed_tokens / self.observed_seconds if self.observed_seconds else 0.0


class Counterfactual:
    """A visitor of `replay` with a second core, which decides with the change."""

    def __init__(self, change: CounterfactualChange) -> None:
        self._change = change
        self.comparison = Comparison()
        self._clock = ReplayClock()
        self._changed_core: EngineController | None = None
        self._arms: dict[Arm, int] = {}
        self._stretch_now: DifferingStretch | None = None

    def on_segment(
        self, opening: Opening, seconds: float, wall_seconds: float, restarts: bool
    ) -> None:
        """Rebuilds the second core after a gap; it continues through consecutive segments."""
        del wall_seconds
        if not restarts:
            return
        self._clock.set(seconds)
        settings = self._change.settings(opening.planner)
        changed_core = rebuild_core(opening, self._clock, settings)
        if self._change.profile is not None:
            try:
                changed_core.use_profile(self._change.profile)
            except SpeculationError as error:
                raise RecordingError(str(error)) from error
        if settings != opening.planner or self._change.profile is not None:
            # So that the plan of the first step is already the changed one.
            changed_core.force_arm(None)
        self._changed_core = changed_core
        self._arms = {arm: i for i, arm in enumerate(changed_core.arms)}
        self._stretch_now = None

    def before_event(
        self, moment: RecordedEvent, wall_seconds: float, core: EngineController
    ) -> None:
        """Compares the choices of both cores for the step, then passes it to the second core."""
        changed_core = self._changed_core
        assert changed_core is not None
        self._clock.set(moment.seconds)
        match moment.kind:
            case "report":
                [report] = moment.arguments
                self._compare(report, wall_seconds, core, changed_core)
                moment = replace(moment, arguments=(_with_own_probe(report, changed_core),))
            case "force":
                self._stretch_now = None
            case "settings":
                planner, training = moment.arguments
                moment = replace(moment, arguments=(self._change.settings(planner), training))
        if not (moment.kind == "profile" and self._change.profile is not None):
            apply_checked(changed_core, moment, "the other choice")

    def _compare(
        self,
        report: StepReport,
        wall: float,
        core: EngineController,
        changed_core: EngineController,
    ) -> None:
        comparison = self.comparison
        if core.current_plan().reason is Reason.PROFILING:
            comparison.measured += 1
            return
        batch = report.batch_size
        recorded_arm, changed_arm = (
            _planned_arm(core.current_plan(), batch),
            _planned_arm(changed_core.current_plan(), batch),
        )
        estimates = (
            self._estimate(recorded_arm, report, core),
            self._estimate(changed_arm, report, core),
        )
        comparison.add(*estimates)
        comparison.observed_tokens += report.generated_tokens
        comparison.observed_seconds += report.step_seconds
        if recorded_arm == changed_arm:
            self._stretch_now = None
            return
        stretch = self._current_stretch(
            recorded_arm, changed_arm, wall, changed_core.current_plan(), batch
        )
        unseen = _is_unseen(changed_arm, core)
        comparison.differing += 1
        comparison.unseen += unseen
        stretch.add(*estimates)
        stretch.unseen += unseen
        stretch.seconds += report.step_seconds
        stretch.batch_min, stretch.batch_max = (
            min(stretch.batch_min, batch),
            max(stretch.batch_max, batch),
        )

    def _estimate(
        self, arm: Arm, report: StepReport, core: EngineController
    ) -> tuple[float, float]:
        """Returns the (tokens, seconds) of the step with this arm, as estimated at that time."""
        decision, index = core.decision, self._arms[arm]
        expected = float(
            decision.values.expected_accepted[index, decision.constraints.row_of(report.batch_size)]
        )
        seconds = core.cost_model.predict(index, report.batch_size, report.kv_tokens)
        return report.decoded_rows * (1 + expected), seconds

    def _current_stretch(
        self, recorded_arm: Arm, changed_arm: Arm, wall: float, plan: Plan, batch: int
    ) -> DifferingStretch:
        stretch, comparison = self._stretch_now, self.comparison
        if stretch is not None and (stretch.recorded, stretch.other) == (recorded_arm, changed_arm):
            return stretch
        reason = plan.row_for(batch).reason.value
        self._stretch_now = stretch = DifferingStretch(
            wall_seconds=wall,
            recorded=recorded_arm,
            other=changed_arm,
            reason=reason,
            batch_min=batch,
        )
        if len(comparison.stretches) < _STRETCHES_KEPT_MAX:
            comparison.stretches.append(stretch)
        else:
            comparison.more_stretches += 1
        return stretch


def _curve(arm: Arm, core: EngineController) -> AcceptanceCurve:
    """Returns the curve of the arm's drafter that the core's last decision used."""
    return core.decision.values.traffic.last_batch[arm.drafter]


def _is_unseen(arm: Arm, core: EngineController) -> bool:
    exposures = _curve(arm, core).exposures
    return arm.gamma > 0 and exposures[arm.gamma - 1] < _EXPOSURES_MIN


def _planned_arm(plan: Plan, batch_size: int) -> Arm:
    return plan.row_for(batch_size).arm


def _with_own_probe(report: StepReport, core: EngineController) -> StepReport:
    """Returns the report with the id of the second core's running probe, if that runs this arm."""
    running = core.explorer.running_probe
    probe = 0
    if running is not None and running[1].arm == report.arm:
        probe = running[1].probe_id
    return report if probe == report.probe_id else replace(report, probe_id=probe)
