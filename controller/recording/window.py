"""A recorded window as numbers for an incident report: a visitor of `replay` that takes notes."""

from array import array
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, dataclass, field

from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.recording.recording import Moment, Opening
from controller.wire.override_text import reason_text, regime_text
from speculation.v1 import plan_pb2, record_pb2

# Plans and notes that are kept, the newest; more are counted.
_KEPT_MAX = 2000


@dataclass(slots=True)
class Steps:
    """One entry a step, in order.

    wall: Unix seconds.  seconds, predicted: of the step, as reported and as the costs said before
    it.  batch: its sequences; decoded: those whose requests had not ended.  arm: an index.
    tokens: what the decoded ones gained.  odd: its seconds are no plain step's.
    """

    wall: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    predicted: "array[float]" = field(default_factory=lambda: array("d"))
    batch: "array[int]" = field(default_factory=lambda: array("q"))
    arm: "array[int]" = field(default_factory=lambda: array("q"))
    decoded: "array[int]" = field(default_factory=lambda: array("q"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    odd: "array[int]" = field(default_factory=lambda: array("b"))

    def __len__(self) -> int:
        return len(self.wall)


@dataclass(slots=True)
class Spell:
    """An override while it held.  began_at: None = before the window; ended_at: None = it holds."""

    term: record_pb2.RecordOverride
    began_at: float | None
    ended_at: float | None = None


@dataclass(slots=True)
class Alone:
    """Steps in a row without a valid lease.  Unix seconds of the first and the last."""

    began_at: float
    ended_at: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A new plan.  arm: what it says for the batch of the last report."""

    wall: float
    epoch: int
    reason: str
    detail: str
    batch: int
    arm: Arm
    regime: str


@dataclass(frozen=True, slots=True)
class Began:
    """A session, as its first opening in the window has it."""

    wall: float
    session: int
    spec: EngineSpec
    versions: dict[str, str]
    planner: dict[str, object]
    cost_source: str
    profile_id: str


@dataclass(slots=True)
class ClassTally:
    """Counts the sequences and accepted draft tokens of one request class."""

    sequences: int = 0
    accepted: int = 0


class Window:
    """Holds everything that an incident report shows."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.arms: list[Arm] = []
        self.reasons: Counter[str] = Counter()
        self.spells: list[Spell] = []
        self.alone: list[Alone] = []
        self.notes: list[tuple[float, record_pb2.RecordNote]] = []
        self.noted: Counter[int] = Counter()
        self.plans: list[PlanChange] = []
        self.plan_count = 0
        self.sessions: list[Began] = []
        self.inputs: list[tuple[float, str]] = []
        self.classes: dict[str, ClassTally] = {}
        self._arm_index: dict[Arm, int] = {}
        self._core_arms: dict[Arm, int] = {}
        self._is_alone = False
        self._last_batch = 1

    def opened(self, opening: Opening, seconds: float, wall_seconds: float, restarts: bool) -> None:
        """A segment begins."""
        del seconds
        message = opening.message
        self._core_arms = {arm: i for i, arm in enumerate(opening.spec.arms)}
        if not self.sessions or self.sessions[-1].session != message.session:
            profile_id = "" if opening.profile is None else opening.profile.profile_id
            self.sessions.append(
                Began(
                    wall_seconds, message.session, opening.spec, dict(message.versions),
                    asdict(opening.planner), message.cost_source, profile_id,
                )
            )  # fmt: skip
            self._is_alone = False
        if restarts:
            first = not self.steps and not self.spells
            self._override(message.overrides, wall_seconds, first=first)

    def before(self, moment: Moment, wall_seconds: float, core: EngineController) -> None:
        """Takes a note of it."""
        record, told = moment.record, moment.told
        match moment.kind:
            case "report":
                self._step(told[0], wall_seconds, core)
            case "decision" | "force" | "parting":
                if moment.plan is not None and moment.plan.rows:
                    self._plan(moment.plan, wall_seconds)
            case "overrides":
                self._override(record.overrides, wall_seconds)
            case "loss":
                for loss in told[0]:
                    self._say(wall_seconds, f"the engine lost {loss.what}: {loss.reason}")
            case "note":
                self.noted[record.note.kind] += record.note.count or 1
                # A copy: the part would keep the whole block that was read.
                self.notes.append((wall_seconds, deepcopy(record.note)))
                del self.notes[:-_KEPT_MAX]
            case "settings":
                constants = changed_constants(asdict(told[0]))
                said = ", ".join(f"{name} = {value}" for name, value in constants.items())
                self._say(wall_seconds, f"settings read again: {said or 'all as they come'}")
            case "profile":
                self._say(wall_seconds, f"profile {told[0].profile_id} put into use")
            case "warm_start":
                self._say(wall_seconds, f"estimates taken over: {record.warm_start.where}")

    def _say(self, wall: float, text: str) -> None:
        self.inputs.append((wall, text))
        del self.inputs[:-_KEPT_MAX]

    def _step(self, report: StepReport, wall: float, core: EngineController) -> None:
        arm, batch, steps = report.arm, report.batch_size, self.steps
        # A report of another engine fails here, before anything of it is kept.
        predicted = core.cost.predict(self._core_arms[arm], batch, report.kv_tokens)
        if arm not in self._arm_index:
            self._arm_index[arm] = len(self.arms)
            self.arms.append(arm)
        steps.wall.append(wall)
        steps.seconds.append(report.step_seconds)
        steps.predicted.append(predicted)
        steps.batch.append(batch)
        steps.arm.append(self._arm_index[arm])
        steps.decoded.append(report.decoded_rows)
        steps.tokens.append(report.generated_tokens)
        steps.odd.append(report.flags.distorts_cost)
        self._last_batch = batch
        row = core.current_plan().row_for(batch)
        self.reasons["probe" if report.probe_id else row.reason.value] += 1
        for part in report.classes:
            counters = self.classes.setdefault(part.label, ClassTally())
            for counts in (part.accepted_counts, part.censored_counts):
                counters.sequences += sum(counts)
                counters.accepted += sum(k * n for k, n in enumerate(counts))
        self._lease(report, wall)

    def _lease(self, report: StepReport, wall: float) -> None:
        if not report.flags.unsteered:
            self._is_alone = False
        elif self._is_alone:
            self.alone[-1].ended_at = wall
            self.alone[-1].steps += 1
        else:
            self._is_alone = True
            self.alone.append(Alone(wall, wall))

    def _plan(self, plan: plan_pb2.Plan, wall: float) -> None:
        self.plan_count += 1
        rows = [row for row in plan.rows if self._last_batch <= row.max_batch_size]
        row = rows[0] if rows else plan.rows[-1]
        self.plans.append(
            PlanChange(
                wall, plan.epoch, reason_text(plan), plan.reason_detail, self._last_batch,
                Arm(row.drafter, row.gamma), regime_text(plan.regime),
            )
        )  # fmt: skip
        del self.plans[:-_KEPT_MAX]

    def _override(
        self, terms: record_pb2.RecordOverrides, wall: float, *, first: bool = False
    ) -> None:
        # Copies: a part would keep the whole block that was read.
        now = {term.override.override_id: deepcopy(term) for term in terms.overrides}
        for spell in self.spells:
            if spell.ended_at is not None:
                continue
            term = now.get(spell.term.override.override_id)
            if term is None or term.override != spell.term.override:
                spell.ended_at = wall
            else:
                spell.term = term
                del now[term.override.override_id]
        self.spells += [Spell(term, None if first else wall) for term in now.values()]


def changed_constants(planner: dict[str, object]) -> dict[str, object]:
    """Returns the constants of a recorded planner that differ from the defaults."""
    default = asdict(PlannerSettings())
    return {name: value for name, value in planner.items() if value != default.get(name)}
