"""Runs one engine's session: its decision loop, its counters, and the streams that wait for news.

    observe(report)   folds and counts      advance()   a new plan if one is due
    ring()            wakes the streams     end(error)  closes them

Everything here runs on the server's event loop; nothing blocks.
"""

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import structlog

from controller.core.acceptance.warm_start import Belief
from controller.core.clock import Clock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, EngineSpec, LostCapability
from controller.core.errors import InvalidReportError, SpeculationError, UnknownArmError
from controller.core.plan import Plan
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training.selective_training import TrainingSettings
from controller.recording.recorded_controller import RecordedController
from controller.service.net.errors import (
    InvalidMeasurementError,
    MeasurementConflictError,
    UnknownDrafterError,
    message_of,
    status_of,
)
from controller.service.net.limits import Bucket
from controller.service.sessions.counters import (
    COUNT_MAX,
    History,
    LastMinute,
    Received,
    StepCounters,
)
from controller.service.sessions.engine_identity import NOBODY, EngineIdentity
from controller.service.sessions.measurements import ForcedMeasurement, UnaryProbes
from controller.service.sessions.session_logs import LENGTH, PlanLogEntry, WarningLog
from speculation.v1 import engine_pb2, record_pb2

# What a session may cost in refusals before it shares an allowance with all others (the unit is a
# refused report, `steering`): more than an engine needs of which few reports are wrong.
_REFUSALS_AT_ONCE = 64
_REFUSALS_A_SECOND = 2

_log = structlog.get_logger(__name__)


def session_tag(session_id: str) -> int:
    """Returns four bytes, never 0, that tell one session from the last few others."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1


class SessionObserver:
    """Receives what happens to sessions; by default it does nothing."""

    def opened(self, session: "EngineSession", before: "EngineSession | None") -> None:
        """Runs when a session opens.  before: the session of the same engine id that it follows."""

    def planning(self) -> None:
        """Runs before a plan is made: overrides that have ended must not shape it."""

    def decided(self, session: "EngineSession", before: Plan, began: int) -> None:
        """Runs after a plan that changes what the engine does.

        before: the plan before it.  began: when it began to be made, Unix nanoseconds.
        """

    def ended(self, session: "EngineSession") -> None:
        """Runs when a session has ended."""


class EngineSession:
    """Serves one introduced engine: `core` decides; this counts, and wakes the streams."""

    def __init__(
        self,
        session_id: str,
        core: EngineController,
        clock: Clock,
        identity: EngineIdentity = NOBODY,
        observer: SessionObserver | None = None,
    ) -> None:
        self.session_id = session_id
        self.tag = session_tag(session_id)
        # Drafters that the engine introduced and this version does not know.
        self.left_out: frozenset[str] = frozenset()
        self.identity = identity
        self._observer = observer or SessionObserver()
        self.core = core
        self.counters = StepCounters()
        self.history = History((drafter.name for drafter in core.spec.drafters), self.counters)
        self.last_minute = LastMinute(self.counters, core.prediction_audit)
        # The newest changes of what its batch shall run, the last one last.
        self.plan_log: deque[PlanLogEntry] = deque(maxlen=LENGTH)
        self.plan = core.current_plan()
        self.last_report: StepReport | None = None
        self.last_report_at = 0.0
        self.last_contact_at = clock.now()
        # A stream was open, or a report came.
        self.used = False
        # Why the session is over, None while it is not.
        self.ended: SpeculationError | None = None
        self.measurement: ForcedMeasurement | None = None
        # The plan is the last one: it is sent once more, after the end.
        self.parting = False
        # The Steer stream that serves the session, while one is open; a newer one takes over.
        self.stream: object | None = None
        # What has arrived on that stream.
        self.received = Received()
        self.unary = UnaryProbes()
        self.refusals = Bucket(_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE)
        self._clock = clock
        self._plan_at = clock.now()
        # Names its decisions in logs and traces; the session's id is a secret of its engine.
        self._label = secrets.token_hex(4)
        self._bells: set[asyncio.Event] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._drafters = frozenset(drafter.name for drafter in core.spec.drafters)
        self.counters.plans[self.plan.reason] += 1
        self.warning_log = WarningLog()
        self._say_lost(core.spec.lost)

    @property
    def spec(self) -> EngineSpec:
        """The engine as it introduced itself."""
        return self.core.spec

    @property
    def engine_id(self) -> str:
        """The engine's own name."""
        return self.core.spec.engine_id

    @property
    def is_over(self) -> bool:
        """Whether it has ended: nothing more is folded."""
        return self.ended is not None

    @property
    def listeners(self) -> int:
        """Streams that wait for news of this session."""
        return len(self._bells)

    @property
    def decision_id(self) -> str:
        """Names the newest plan for logs and traces; its epoch follows the dash."""
        return f"{self._label}-{self.plan.epoch}"

    @property
    def plan_age_seconds(self) -> float:
        """Returns the seconds since the newest plan was made."""
        return self._clock.now() - self._plan_at

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since the engine last said anything; 0 while one of its streams is open."""
        return 0.0 if self._bells else self._clock.now() - self.last_contact_at

    @property
    def seconds_since_steered(self) -> float:
        """Counts as `seconds_since_contact` does, but only by a stream of the engine itself."""
        if self.stream is not None:
            return 0.0
        return self._clock.now() - self.last_contact_at

    @property
    def seconds_since_last_report(self) -> float:
        """Seconds since the last report that was used; 0 before the first."""
        return self._clock.now() - self.last_report_at if self.last_report else 0.0

    def remember(self, now: float) -> None:
        """Adds a point to the history and logs new warnings, once a second.  now: Unix seconds."""
        self.history.add(now, self.plan, self.last_report, self.counters)
        self.last_minute.keep()
        self.warning_log.tell(self.engine_id, self.core.checks.warnings(), self._clock.now())

    def continue_checks(self, before: "EngineSession") -> None:
        """Keeps what was found out in the session before about this very engine."""
        self.core.checks.continue_from(before.core.checks)
        self.warning_log = before.warning_log

    def contact(self, dropped_reports: int = 0) -> None:
        """A sign of life, with the reports that were lost on the engine's side."""
        self.last_contact_at = self._clock.now()
        if dropped_reports:
            self.counters.dropped = min(self.counters.dropped + dropped_reports, COUNT_MAX)
            _log.warning("reports_dropped", engine=self.engine_id, dropped=dropped_reports)
            self.note(record_pb2.RECORD_NOTE_KIND_DROPPED, dropped_reports)

    def note(
        self, kind: "record_pb2.RecordNoteKind.ValueType", count: int = 0, text: str = ""
    ) -> None:
        """Adds a note to the recording, if there is one."""
        if isinstance(self.core, RecordedController):
            self.core.note(kind, count, text)

    def observe(self, report: StepReport, message: engine_pb2.StepReport | None = None) -> None:
        """Folds one report.  message: what it was read from, for the recording.

        Raises InvalidReportError; nothing of the report is used then.
        """
        if report.drafter not in self._drafters:
            raise UnknownDrafterError(
                f"step {report.step}: unknown drafter {report.drafter[:80]!r}; "
                f"this engine introduced {sorted(self._drafters)}",
                field_path="drafter",
            )
        if isinstance(self.core, RecordedController):
            self.core.observe(report, message)
        else:
            self.core.observe(report)
        alone = self.counters.alone
        self.counters.count(report, self.last_report)
        if self.counters.alone is not alone and alone is not None:
            self._say_alone(report)
        self.used = True
        self.last_report = report
        self.last_report_at = self._clock.now()
        if self.measurement is not None:
            self.measurement.put(report)
            self.ring()

    def lose(self, losses: Iterable[LostCapability]) -> None:
        """Plans without what the engine has lost.  Raises InvalidLossError."""
        news = self.core.lose(losses)
        if not news:
            return
        self._say_lost(news)
        self.ring()
        measured = self.measurement
        if measured is None or measured.arm is None:
            return
        loss = self.spec.loss_of(measured.arm)
        if loss is not None:
            measured.failed = InvalidMeasurementError(
                f"engine {self.engine_id!r} has lost {loss.what} while it was measured: "
                f"{loss.reason}",
                field_path="gamma",
            )

    def _say_lost(self, losses: Iterable[LostCapability]) -> None:
        for loss in losses:
            _log.warning(
                "capability_lost", engine=self.engine_id, lost=loss.what, reason=loss.reason
            )

    @property
    def newest_step(self) -> int:
        """The step of the last report that was used, -1 for none; reports up to it are stale."""
        return -1 if self.last_report is None else self.last_report.step

    def reject(self, error: InvalidReportError, count: int = 1) -> None:
        """Counts reports refused for one reason; the first of its kind in a session is logged."""
        code = status_of(error).name
        is_new = not self.counters.rejected[code]
        self.counters.rejected[code] += count
        text = message_of(error) if is_new else code
        self.note(record_pb2.RECORD_NOTE_KIND_REJECTED, count, text)
        if is_new:
            _log.warning(
                "report_rejected", engine=self.engine_id, code=code, error=message_of(error)
            )

    @property
    def is_plan_due(self) -> bool:
        """Whether `advance` would decide again, which takes a while."""
        return self.core.is_plan_due(self._clock.now())

    def advance(self) -> Plan:
        """The newest plan, after making one if one is due."""
        self._observer.planning()
        began = time.time_ns()
        plan = self.core.next_plan()
        if plan is not None:
            self._adopt(plan, began)
        return self.plan

    def _adopt(self, plan: Plan, began: int) -> None:
        before, self.plan, self._plan_at = self.plan, plan, self._clock.now()
        self.counters.plans[plan.reason] += 1
        if not _differ(before, plan):
            return
        size = self.last_report.batch_size if self.last_report else 1
        arm, was = plan.row_for(size).arm, before.row_for(size).arm
        if arm != was or _differ_everywhere(before, plan):
            self.plan_log.append(PlanLogEntry.of(time.time(), size, before, plan))
        _log.info(
            "plan_changed",
            engine=self.engine_id,
            decision=self.decision_id,
            batch_size=size,
            drafter=arm.drafter,
            gamma=arm.gamma,
            was=f"{was.drafter} {was.gamma}",
            regime=str(plan.regime),
            reason=plan.reason.value,
            detail=plan.reason_detail,
            overrides=list(plan.overrides),
        )
        self._observer.decided(self, before, began)

    def _say_alone(self, report: StepReport) -> None:
        where = {"engine": self.engine_id, "step": report.step, "epoch": report.plan_epoch}
        if report.flags.unsteered:
            _log.warning("lease_lost", **where)
        else:
            _log.info("steered_again", **where)

    def part(self, lease_seconds: float) -> None:
        """The sidecar goes: the engine shall hold its plan for so long (0: for its lease)."""
        if lease_seconds:
            self._observer.planning()
            self._adopt(self.core.last_plan(lease_seconds), time.time_ns())
        self.parting = True

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Decides by these constants from now on."""
        self.core.use_settings(settings, training)
        self.ring()

    def use_profile(self, profile: Profile) -> None:
        """Prices everything by this profile from now on.  Raises ProfileMismatchError."""
        self.core.use_profile(profile)
        self.ring()

    def begin_from(self, beliefs: Iterable[Belief], where: str) -> None:
        """Warms the estimates by what was known elsewhere; where: for people."""
        self.core.begin_from(beliefs, where)
        self.ring()

    @contextmanager
    def measuring(self) -> Iterator[ForcedMeasurement]:
        """Reserves the engine for one measurement; normal planning goes on afterwards.

        Raises MeasurementConflictError while another one is under way.
        """
        if self.measurement is not None:
            raise MeasurementConflictError(
                f"engine {self.engine_id!r} is being measured already: wait for it to end",
                resource=self.engine_id,
            )
        self.measurement = ForcedMeasurement()
        try:
            yield self.measurement
        finally:
            self.measurement = None
            self._observer.planning()
            self._adopt(self.core.force(None), time.time_ns())
            self.ring()

    def force(self, measurement: ForcedMeasurement, arm: Arm) -> None:
        """Makes the engine run `arm` in every batch.  Raises InvalidMeasurementError."""
        self._observer.planning()
        began = time.time_ns()
        try:
            plan = self.core.force(arm)
        except UnknownArmError as error:
            raise InvalidMeasurementError(str(error), field_path=error.field_path) from error
        self._adopt(plan, began)
        measurement.forced_epoch, measurement.arm = plan.epoch, arm
        self.ring()

    @contextmanager
    def listening(self, bell: asyncio.Event) -> Iterator[None]:
        """While open, `bell` is set whenever there may be news (a plan, the session's end)."""
        self.used = True
        self._bells.add(bell)
        self._quiet.clear()
        try:
            yield
        finally:
            self._bells.discard(bell)
            if not self._bells:
                self._quiet.set()
            self.contact()

    def ring(self) -> None:
        """Wakes the streams."""
        for bell in self._bells:
            bell.set()

    async def quiet(self) -> None:
        """Returns when no stream is open."""
        await self._quiet.wait()

    def end(self, why: SpeculationError) -> None:
        """Ends the session; its streams close with this error."""
        self.ended = why
        self.note(record_pb2.RECORD_NOTE_KIND_ENDED, text=message_of(why))
        self.ring()


def _differ(before: Plan, plan: Plan) -> bool:
    """Returns whether the engine must do something else; probes and leases do not count."""
    if _differ_everywhere(before, plan):
        return True
    rows = zip(before.rows, plan.rows, strict=False)
    return len(before.rows) != len(plan.rows) or any(
        old is not new and (old.max_batch_size, old.arm) != (new.max_batch_size, new.arm)
        for old, new in rows
    )


def _differ_everywhere(before: Plan, plan: Plan) -> bool:
    """Whether something changes that is no row's own."""
    return (before.regime, before.draft_version, before.overrides) != (
        plan.regime, plan.draft_version, plan.overrides,
    )  # fmt: skip
