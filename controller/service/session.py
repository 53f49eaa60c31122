"""One engine's session: its decision loop, its tally, and the streams that wait for its news.

    observe(report)   folds and counts      advance()   a new plan if one is due
    ring()            wakes the streams     end(error)  closes them

Everything here runs on the server's event loop; nothing blocks.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from controller.core.clock import Clock
from controller.core.engine_controller import EngineController
from controller.core.errors import InvalidReportError, SpeculationError, UnknownArmError
from controller.core.profile import Profile
from controller.core.types import Arm, EngineSpec, Plan, Reason, StepReport
from controller.core.warm_start import Belief
from controller.recording.events import NoteKind
from controller.service.errors import (
    InvalidMeasurementError,
    MeasurementConflictError,
    SlowClientError,
    UnknownDrafterError,
    message_of,
    status_of,
)
from controller.service.unary import UnaryProbes

# Reports that may wait for the client of a measurement: half a minute of a fast engine.
_MEASURED_MAX = 10_000

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Tally:
    """What an engine's session has seen; only ever grows (seconds and tokens since its start)."""

    reports: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    plans: Counter[Reason] = field(default_factory=Counter)
    step_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    unsteered: int = 0
    eager: int = 0
    updates: int = 0
    rounds: Counter[str] = field(default_factory=Counter)

    def count(self, report: StepReport) -> None:
        """Adds one report that was used."""
        accepted = 0
        for k, sequences in enumerate(report.accepted_counts):
            accepted += k * sequences
        self.reports += 1
        self.step_seconds += report.step_seconds
        self.drafted_tokens += report.gamma * report.batch_size
        self.accepted_tokens += accepted
        self.generated_tokens += accepted + report.batch_size
        self.unsteered += report.flags.unsteered
        self.eager += report.flags.eager_fallback
        self.updates += report.update_seconds > 0


class Measurement:
    """An engine under measurement: the forced choice, and reports on their way to the client."""

    def __init__(self) -> None:
        self.forced_epoch = 0
        self.reports: deque[StepReport] = deque()
        self.overflowed = False

    def take(self) -> list[StepReport]:
        """The reports since the last call.  Raises SlowClientError once some had to be dropped."""
        if self.overflowed:
            raise SlowClientError(
                f"more than {_MEASURED_MAX} reports wait for this client: a measurement with "
                "gaps is none, start again and read faster"
            )
        taken = list(self.reports)
        self.reports.clear()
        return taken

    def put(self, report: StepReport) -> None:
        """Keeps one report for the client, up to a bound."""
        if len(self.reports) < _MEASURED_MAX:
            self.reports.append(report)
        else:
            self.overflowed = True


class Session:
    """One introduced engine.  `core` decides; this counts, and tells streams of news."""

    def __init__(self, session_id: str, core: EngineController, clock: Clock) -> None:
        self.session_id = session_id
        self.core = core
        self.tally = Tally()
        self.plan = core.current_plan()
        self.last_report: StepReport | None = None
        self.last_report_at = 0.0
        self.last_contact_at = clock.now()
        # Why the session is over, None while it is not.
        self.ended: SpeculationError | None = None
        self.measurement: Measurement | None = None
        # The Steer stream that serves the session; a newer one takes over.
        self.stream: object | None = None
        self.unary = UnaryProbes()
        # Told what the core is not, where decisions are recorded.
        self.on_note: Callable[[NoteKind, int, str], None] | None = None
        self._clock = clock
        self._bells: set[asyncio.Event] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._drafters = frozenset(drafter.name for drafter in core.spec.drafters)
        self.tally.plans[self.plan.reason] += 1

    @property
    def spec(self) -> EngineSpec:
        """The engine as it introduced itself."""
        return self.core.spec

    @property
    def engine_id(self) -> str:
        """The engine's own name."""
        return self.core.spec.engine_id

    @property
    def listeners(self) -> int:
        """Streams that wait for news of this session."""
        return len(self._bells)

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since the engine last said anything; 0 while one of its streams is open."""
        return 0.0 if self._bells else self._clock.now() - self.last_contact_at

    @property
    def seconds_since_last_report(self) -> float:
        """Seconds since the last report that was used; 0 before the first."""
        return self._clock.now() - self.last_report_at if self.last_report else 0.0

    def contact(self, dropped_reports: int = 0) -> None:
        """A sign of life, with the reports that were lost on the engine's side."""
        self.last_contact_at = self._clock.now()
        if dropped_reports:
            self.tally.dropped += dropped_reports
            self.note(NoteKind.DROPPED, dropped_reports)

    def note(self, kind: NoteKind, count: int = 0, text: str = "") -> None:
        """For the recording, if there is one."""
        if self.on_note is not None:
            self.on_note(kind, count, text)

    def observe(self, report: StepReport) -> None:
        """Folds one report.  Raises InvalidReportError; nothing of the report is used then."""
        if report.drafter not in self._drafters:
            raise UnknownDrafterError(
                f"step {report.step}: unknown drafter {report.drafter!r}; "
                f"this engine introduced {sorted(self._drafters)}"
            )
        self.core.observe(report)
        self.tally.count(report)
        self.last_report = report
        self.last_report_at = self._clock.now()
        if self.measurement is not None:
            self.measurement.put(report)
            self.ring()

    def reject(self, error: InvalidReportError) -> None:
        """Counts a refused report; the first of its kind in a session is logged."""
        code = status_of(error).name
        self.tally.rejected[code] += 1
        is_new = self.tally.rejected[code] == 1
        self.note(NoteKind.REJECTED, 1, message_of(error) if is_new else code)
        if is_new:
            _log.warning(
                "report_rejected", engine=self.engine_id, code=code, error=message_of(error)
            )

    def advance(self) -> Plan:
        """The newest plan, after making one if one is due."""
        plan = self.core.next_plan()
        if plan is not None:
            self._adopt(plan)
        return self.plan

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self.tally.plans[plan.reason] += 1

    def use_profile(self, profile: Profile) -> None:
        """Prices everything by this profile from now on.  Raises ProfileMismatchError."""
        self.core.use_profile(profile)
        self.ring()

    def begin_from(self, beliefs: Iterable[Belief], where: str) -> None:
        """Warms the estimates by what was known elsewhere; where: for people."""
        self.core.begin_from(beliefs, where)
        self.ring()

    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        """Reserves the engine for one measurement; normal planning goes on afterwards.

        Raises MeasurementConflictError while another one is under way.
        """
        if self.measurement is not None:
            raise MeasurementConflictError(
                f"engine {self.engine_id!r} is being measured already: wait for it to end"
            )
        self.measurement = Measurement()
        try:
            yield self.measurement
        finally:
            self.measurement = None
            self._adopt(self.core.force(None))
            self.ring()

    def force(self, measurement: Measurement, arm: Arm) -> None:
        """Makes the engine run `arm` in every batch.  Raises InvalidMeasurementError."""
        try:
            plan = self.core.force(arm)
        except UnknownArmError as error:
            raise InvalidMeasurementError(str(error)) from error
        self._adopt(plan)
        measurement.forced_epoch = plan.epoch
        self.ring()

    @contextmanager
    def listening(self, bell: asyncio.Event) -> Iterator[None]:
        """While open, `bell` is set whenever there may be news (a plan, the session's end)."""
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
        self.note(NoteKind.ENDED, text=message_of(why))
        self.ring()
