"""Runs one engine's session: its decision loop, its counters, and the streams that wait for plans.

    observe(report)   learns and counts     advance()   makes a new plan if one is due
    ring()            wakes the streams     end(error)  closes them

Everything here runs on the server's event loop, and nothing blocks.
"""

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import structlog

from controller.core.acceptance.warm_start import AcceptanceSnapshot
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
    error_text,
    status_code_of,
)
from controller.service.net.limits import TokenBucket
from controller.service.sessions.counters import (
    COUNT_MAX,
    History,
    LastMinute,
    ReceivedCounts,
    StepCounters,
)
from controller.service.sessions.engine_identity import ANONYMOUS, EngineIdentity
from controller.service.sessions.measurements import ForcedMeasurement, UnaryProbes
from controller.service.sessions.session_logs import PLAN_LOG_LENGTH, PlanLogEntry, WarningLog
from speculation.v1 import engine_pb2, record_pb2

# Refusals that a session may cause before it uses the limit that it shares with its source (the
# unit is a refused report, see `steering`): enough for an engine with a few wrong reports.
_REFUSALS_BURST = 64
_REFUSALS_PER_SECOND = 2

_log = structlog.get_logger(__name__)


def session_tag(session_id: str) -> int:
    """Returns a 32-bit number, never 0, that distinguishes a session from the ones before it."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1


class SessionObserver:
    """Receives the events of sessions; by default it ignores them."""

    def on_session_opened(
        self, session: "EngineSession", previous_session: "EngineSession | None"
    ) -> None:
        """Runs when a session opens.  previous_session: the earlier one of the same engine id."""

    def before_planning(self) -> None:
        """Runs before a plan is made, so that expired overrides can be ended first."""

    def on_plan_changed(
        self, session: "EngineSession", previous_plan: Plan, began_unix_ns: int
    ) -> None:
        """Runs after a plan that changes what the engine does.

        previous_plan: the previous plan.  began_unix_ns: when the decision began, Unix nanoseconds.
        """

    def on_session_ended(self, session: "EngineSession") -> None:
        """Runs when a session has ended."""


class EngineSession:
    """Serves one introduced engine: `core` decides, the session counts and wakes the streams."""

    def __init__(
        self,
        session_id: str,
        core: EngineController,
        clock: Clock,
        identity: EngineIdentity = ANONYMOUS,
        observer: SessionObserver | None = None,
    ) -> None:
        self.session_id = session_id
        self.tag = session_tag(session_id)
        # Drafters of the engine whose kind this version does not know.
        self.unknown_drafters: frozenset[str] = frozenset()
        self.identity = identity
        self._observer = observer or SessionObserver()
        self.core = core
        self._recorded_core = core if isinstance(core, RecordedController) else None
        self.counters = StepCounters()
        self.history = History((drafter.name for drafter in core.spec.drafters), self.counters)
        self.last_minute = LastMinute(self.counters, core.prediction_audit)
        # The latest changes of the choice for its batch size, the newest last.
        self.plan_log: deque[PlanLogEntry] = deque(maxlen=PLAN_LOG_LENGTH)
        self.plan = core.current_plan()
        self.last_report: StepReport | None = None
        self.last_report_at = 0.0
        self.last_contact_at = clock.now()
        # Whether a stream was opened or a report arrived.
        self.was_used = False
        # Why the session has ended, None while it is open.
        self.end_error: SpeculationError | None = None
        self.measurement: ForcedMeasurement | None = None
        # The sidecar is shutting down: the last plan is still sent after the session's end.
        self.is_shutting_down = False
        # The Steer stream that serves the session, while one is open; a newer one replaces it.
        self.stream: object | None = None
        # What has arrived on that stream.
        self.received = ReceivedCounts()
        self.unary_probes = UnaryProbes()
        self.refusal_bucket = TokenBucket(_REFUSALS_PER_SECOND, _REFUSALS_BURST)
        self._clock = clock
        self._planned_at = clock.now()
        # Identifies its decisions in logs and traces; the session id is a secret of the engine.
        self._log_label = secrets.token_hex(4)
        self._stream_events: set[asyncio.Event] = set()
        self._streams_closed = asyncio.Event()
        self._streams_closed.set()
        self._drafters = frozenset(drafter.name for drafter in core.spec.drafters)
        self.counters.plans[self.plan.reason] += 1
        self.warning_log = WarningLog()
        self._log_lost(core.spec.lost)

    @property
    def spec(self) -> EngineSpec:
        """Returns the engine's description."""
        return self.core.spec

    @property
    def engine_id(self) -> str:
        """Returns the engine's id."""
        return self.core.spec.engine_id

    @property
    def has_ended(self) -> bool:
        """Returns whether the session has ended; it then takes no more reports."""
        return self.end_error is not None

    @property
    def open_streams(self) -> int:
        """Returns the number of streams that wait for this session."""
        return len(self._stream_events)

    @property
    def decision_id(self) -> str:
        """Identifies the newest plan in logs and traces; its epoch follows the dash."""
        return f"{self._log_label}-{self.plan.epoch}"

    @property
    def plan_age_seconds(self) -> float:
        """Returns the seconds since the newest plan was made."""
        return self._clock.now() - self._planned_at

    @property
    def seconds_since_contact(self) -> float:
        """Returns the seconds since the engine's last message; 0 while a stream is open."""
        return 0.0 if self._stream_events else self._clock.now() - self.last_contact_at

    @property
    def seconds_since_steered(self) -> float:
        """Returns the same as `seconds_since_contact`, but considers only the engine's stream."""
        if self.stream is not None:
            return 0.0
        return self._clock.now() - self.last_contact_at

    @property
    def seconds_since_last_report(self) -> float:
        """Returns the seconds since the last accepted report; 0 before the first."""
        return self._clock.now() - self.last_report_at if self.last_report else 0.0

    def add_history_point(self, now: float) -> None:
        """Adds a point to the history and logs new warnings, once a second.  now: Unix seconds."""
        self.history.add_point(now, self.plan, self.last_report, self.counters)
        self.last_minute.sample()
        self.warning_log.log_changes(self.engine_id, self.core.checks.warnings(), self._clock.now())

    def continue_checks(self, previous_session: "EngineSession") -> None:
        """Continues the checks and warnings of the engine's previous session."""
        self.core.checks.continue_from(previous_session.core.checks)
        self.warning_log = previous_session.warning_log

    def record_contact(self, dropped_reports: int = 0) -> None:
        """Records a contact.  dropped_reports: reports that the engine's side has dropped."""
        self.last_contact_at = self._clock.now()
        if dropped_reports:
            self.counters.dropped_reports = min(
                self.counters.dropped_reports + dropped_reports, COUNT_MAX
            )
            _log.warning("reports_dropped", engine=self.engine_id, dropped=dropped_reports)
            self.add_recording_note(record_pb2.RECORD_NOTE_KIND_DROPPED, dropped_reports)

    def add_recording_note(
        self, kind: "record_pb2.RecordNoteKind.ValueType", count: int = 0, text: str = ""
    ) -> None:
        """Adds a note to the recording, if there is one."""
        if self._recorded_core is not None:
            self._recorded_core.note(kind, count, text)

    def observe(self, report: StepReport, message: engine_pb2.StepReport | None = None) -> None:
        """Processes one report.  message: its protobuf message, for the recording.

        Raises InvalidReportError; the report is then ignored entirely.
        """
        if report.drafter not in self._drafters:
            raise UnknownDrafterError(
                f"step {report.step}: unknown drafter {report.drafter[:80]!r}; "
                f"this engine introduced {sorted(self._drafters)}",
                field_path="drafter",
            )
        if self._recorded_core is None:
            self.core.observe(report)
        else:
            self._recorded_core.observe(report, message)
        was_unsteered = self.counters.last_step_unsteered
        self.counters.add_report(report, self.last_report)
        if self.counters.last_step_unsteered is not was_unsteered and was_unsteered is not None:
            self._log_lease_change(report)
        self.was_used = True
        self.last_report = report
        self.last_report_at = self._clock.now()
        if self.measurement is not None:
            self.measurement.add_report(report)
            self.wake_streams()

    def record_lost_capabilities(self, lost_capabilities: Iterable[LostCapability]) -> None:
        """Removes lost capabilities from planning.  Raises InvalidLossError."""
        newly_lost = self.core.record_lost_capabilities(lost_capabilities)
        if not newly_lost:
            return
        self._log_lost(newly_lost)
        self.wake_streams()
        measurement = self.measurement
        if measurement is None or measurement.arm is None:
            return
        lost_capability = self.spec.lost_capability_of(measurement.arm)
        if lost_capability is not None:
            measurement.error = InvalidMeasurementError(
                f"engine {self.engine_id!r} has lost {lost_capability.description} while it was "
                "measured: "
                f"{lost_capability.reason}",
                field_path="gamma",
            )

    def _log_lost(self, lost_capabilities: Iterable[LostCapability]) -> None:
        for lost_capability in lost_capabilities:
            _log.warning(
                "capability_lost",
                engine=self.engine_id,
                lost=lost_capability.description,
                reason=lost_capability.reason,
            )

    @property
    def newest_step(self) -> int:
        """Returns the step of the last accepted report, -1 for none; earlier ones are stale."""
        return -1 if self.last_report is None else self.last_report.step

    def reject(self, error: InvalidReportError, count: int = 1) -> None:
        """Counts reports refused for one reason; the first of each code in a session is logged."""
        code = status_code_of(error).name
        is_new = not self.counters.rejected[code]
        self.counters.rejected[code] += count
        text = error_text(error) if is_new else code
        self.add_recording_note(record_pb2.RECORD_NOTE_KIND_REJECTED, count, text)
        if is_new:
            _log.warning(
                "report_rejected", engine=self.engine_id, code=code, error=error_text(error)
            )

    @property
    def is_plan_due(self) -> bool:
        """Returns whether `make_due_plan` would make a decision, which takes a while."""
        return self.core.is_plan_due(self._clock.now())

    def make_due_plan(self) -> Plan:
        """Makes a plan if one is due, and returns the newest plan."""
        self._observer.before_planning()
        began_unix_ns = time.time_ns()
        plan = self.core.next_plan()
        if plan is not None:
            self._adopt_plan(plan, began_unix_ns)
        return self.plan

    def _adopt_plan(self, plan: Plan, began_unix_ns: int) -> None:
        previous_plan, self.plan, self._planned_at = self.plan, plan, self._clock.now()
        self.counters.plans[plan.reason] += 1
        if not _changes_engine(previous_plan, plan):
            return
        batch_size = self.last_report.batch_size if self.last_report else 1
        arm, previous_arm = plan.row_for(batch_size).arm, previous_plan.row_for(batch_size).arm
        if arm != previous_arm or _differs_outside_rows(previous_plan, plan):
            self.plan_log.append(
                PlanLogEntry.from_plans(time.time(), batch_size, previous_plan, plan)
            )
        _log.info(
            "plan_changed",
            engine=self.engine_id,
            decision=self.decision_id,
            batch_size=batch_size,
            drafter=arm.drafter,
            gamma=arm.gamma,
            was=f"{previous_arm.drafter} {previous_arm.gamma}",
            regime=str(plan.regime),
            reason=plan.reason.value,
            detail=plan.reason_detail,
            overrides=list(plan.overrides),
        )
        self._observer.on_plan_changed(self, previous_plan, began_unix_ns)

    def _log_lease_change(self, report: StepReport) -> None:
        log_context = {"engine": self.engine_id, "step": report.step, "epoch": report.plan_epoch}
        if report.flags.unsteered:
            _log.warning("lease_lost", **log_context)
        else:
            _log.info("steered_again", **log_context)

    def plan_for_shutdown(self, lease_seconds: float) -> None:
        """Prepares the sidecar's shutdown.

        lease_seconds: how long the engine keeps its last plan; 0: for its lease.
        """
        if lease_seconds:
            self._observer.before_planning()
            self._adopt_plan(self.core.make_last_plan(lease_seconds), time.time_ns())
        self.is_shutting_down = True

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Uses these settings from now on."""
        self.core.use_settings(settings, training)
        self.wake_streams()

    def use_profile(self, profile: Profile) -> None:
        """Uses the costs of this profile from now on.  Raises ProfileMismatchError."""
        self.core.use_profile(profile)
        self.wake_streams()

    def warm_start_from(self, snapshots: Iterable[AcceptanceSnapshot], source: str) -> None:
        """Warm-starts the estimates.  source: the source of `snapshots`, for people."""
        self.core.warm_start_from(snapshots, source)
        self.wake_streams()

    @contextmanager
    def reserve_for_measurement(self) -> Iterator[ForcedMeasurement]:
        """Reserves the engine for one measurement; normal planning continues afterwards.

        Raises MeasurementConflictError if another measurement is under way.
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
            self._observer.before_planning()
            self._adopt_plan(self.core.force_arm(None), time.time_ns())
            self.wake_streams()

    def force_arm(self, measurement: ForcedMeasurement, arm: Arm) -> None:
        """Makes the engine run `arm` in every batch.  Raises InvalidMeasurementError."""
        self._observer.before_planning()
        began_unix_ns = time.time_ns()
        try:
            plan = self.core.force_arm(arm)
        except UnknownArmError as error:
            raise InvalidMeasurementError(str(error), field_path=error.field_path) from error
        self._adopt_plan(plan, began_unix_ns)
        measurement.forced_epoch, measurement.arm = plan.epoch, arm
        self.wake_streams()

    @contextmanager
    def register_stream(self, event: asyncio.Event) -> Iterator[None]:
        """Registers a stream: inside the block, `event` is set for every plan and at the end."""
        self.was_used = True
        self._stream_events.add(event)
        self._streams_closed.clear()
        try:
            yield
        finally:
            self._stream_events.discard(event)
            if not self._stream_events:
                self._streams_closed.set()
            self.record_contact()

    def wake_streams(self) -> None:
        """Wakes the streams."""
        for event in self._stream_events:
            event.set()

    async def wait_until_streams_closed(self) -> None:
        """Waits until no stream is open."""
        await self._streams_closed.wait()

    def end(self, error: SpeculationError) -> None:
        """Ends the session; its streams close with this error."""
        self.end_error = error
        self.add_recording_note(record_pb2.RECORD_NOTE_KIND_ENDED, text=error_text(error))
        self.wake_streams()


def _changes_engine(previous_plan: Plan, plan: Plan) -> bool:
    """Returns whether the plan changes what the engine does; probes and leases do not count."""
    if _differs_outside_rows(previous_plan, plan):
        return True
    rows = zip(previous_plan.rows, plan.rows, strict=False)
    return len(previous_plan.rows) != len(plan.rows) or any(
        old is not new and (old.max_batch_size, old.arm) != (new.max_batch_size, new.arm)
        for old, new in rows
    )


def _differs_outside_rows(previous_plan: Plan, plan: Plan) -> bool:
    """Returns whether the plans differ in something that applies to all rows."""
    return (previous_plan.regime, previous_plan.draft_version, previous_plan.overrides) != (
        plan.regime, plan.draft_version, plan.overrides,
    )  # fmt: skip
