"""Serves the SpeculationService: engines send step reports, the sidecar sends plans.

A Steer stream has one reader and one writer.  The reader processes reports as they arrive.  The
writer requests a plan when one is due (the streams take turns at decisions), and sends the newest
plan that the engine does not have yet.  The writer wakes up when it has something to do, and a few
times per lease, so that an idle engine's lease is renewed too.  Nothing is queued for a slow
client: outdated plans are skipped, and the reader stops if rejections pile up.

After the end of its session a stream processes no more reports, so that the count of received
reports is final.  If the sidecar stops, it sends that count on the stream; otherwise it sends it
when the engine introduces itself again.  The agent then sends the missing reports.  Every response
acknowledges the reports received so far.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Final

import grpc.aio
import structlog

from controller.core.errors import (
    InvalidLossError,
    InvalidReportError,
    SpeculationError,
    StaleReportError,
    error_field_prefix,
)
from controller.core.plan import Plan
from controller.core.step_report import StepReport
from controller.service.net import callers
from controller.service.net.errors import (
    Context,
    NoSessionError,
    TooManyReportsError,
    error_kind_of,
    error_text,
)
from controller.service.net.limits import FairQueue, SharedRateLimit
from controller.service.rpc import streams
from controller.service.rpc.streams import DecisionScheduler, read_message, run_alongside
from controller.service.sessions.counters import COUNT_MAX, ReceivedCounts
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.wire.engines import (
    engine_from_proto,
    lost_capabilities_from_proto,
    remove_unknown_drafters,
)
from controller.wire.plans import plan_to_proto, reason_to_proto
from controller.wire.reports import report_from_proto
from speculation.v1 import engine_pb2, record_pb2, service_pb2, service_pb2_grpc

# Introductions that may wait: as many as the default limit of engines.
_WAITING_INTRODUCTIONS_MAX: Final = 1024
# The most reports in a message.
MESSAGE_REPORTS_MAX: Final = 4096
# Other streams get their turn after this many reports of a message, or after this time.  The number
# is also the limit of rejections in one response.
_CHUNK_REPORTS = 256
_SLICE_SECONDS = 0.002
# Refusals per second, and burst, of one source.  The unit is a refused report, which takes about
# 40 us: 2 % of a core for each source.  A stale report that is refused together with others costs
# little more than its parsing.
REFUSALS_PER_SECOND: Final = 500.0
REFUSALS_BURST: Final = 500.0
STALE_REPORT_COST: Final = 1 / 32
# Unacknowledged messages with reports that an engine may have: an engine that is served late sends
# fewer, with more reports in each, which take less time.  They are acknowledged together.
_MESSAGES_IN_FLIGHT: Final = 2
# How often per lease an idle stream checks whether a plan is due.
_WAKE_UPS_PER_LEASE = 8
_WAKE_UP_SECONDS_MAX = 0.5
_LAST_PLAN_SECONDS = 0.1

_log = structlog.get_logger(__name__)


class SpeculationServicer(service_pb2_grpc.SpeculationServiceServicer):
    """Serves Introduce, Steer and Decide."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._introduction_queue = FairQueue(_WAITING_INTRODUCTIONS_MAX)
        self._decision_scheduler = DecisionScheduler()
        self._refusal_limit = SharedRateLimit(REFUSALS_PER_SECOND, REFUSALS_BURST)

    async def Introduce(
        self, request: service_pb2.IntroduceRequest, context: Context
    ) -> service_pb2.IntroduceResponse:
        """Opens a session."""
        session = await self._introduction_queue.run(lambda: self._open_session(request))
        received = self._registry.find_received(request.previous_session_id)
        return service_pb2.IntroduceResponse(
            session_id=session.session_id,
            plan=plan_to_proto(session.plan, session.tag),
            received=None if received is None else _received_to_proto(received),
            messages_in_flight_max=_MESSAGES_IN_FLIGHT,
        )

    def _open_session(self, request: service_pb2.IntroduceRequest) -> EngineSession:
        with error_field_prefix("engine"):
            unknown_drafters = remove_unknown_drafters(request.engine)
            spec = engine_from_proto(request.engine)
        callers.require_engine(spec.engine_id)
        identity = EngineIdentity.from_caller(callers.current_caller(), request.engine_secret)
        session = self._registry.introduce(spec, identity)
        if unknown_drafters:
            session.unknown_drafters = unknown_drafters
            _log.warning(
                "drafters_left_out",
                engine=spec.engine_id,
                drafters=sorted(unknown_drafters),
                detail="this sidecar does not know their kind and steers without them: upgrade it",
            )
        return session

    async def Steer(  # type: ignore[override]  # grpc.aio also takes a coroutine that reads and writes through its context
        self,
        request_iterator: AsyncIterator[service_pb2.SteerRequest],
        context: grpc.aio.ServicerContext[service_pb2.SteerRequest, service_pb2.SteerResponse],
    ) -> None:
        """Receives reports and sends plans, until either side ends the stream."""
        first_request = await streams.read_first_message(context)
        if first_request is None:
            return
        session = self._registry.find_by_token(first_request.session_id)
        callers.require_engine(session.engine_id)
        await _SteerStream(session, context, self._decision_scheduler, self._refusal_limit).run(
            first_request
        )

    async def Decide(
        self, request: service_pb2.DecideRequest, context: Context
    ) -> service_pb2.DecideResponse:
        """Processes one report, and returns the choice for its batch size."""
        session = self._registry.find_by_token(request.session_id)
        callers.require_engine(session.engine_id)
        session.record_contact()
        return _decide(session, request.report)


def _decide(session: EngineSession, message: engine_pb2.StepReport) -> service_pb2.DecideResponse:
    try:
        with error_field_prefix("report"):
            report = session.unary_probes.add_probe_id(_session_report(session, message))
            session.observe(report, message)
    except InvalidReportError as error:
        session.reject(error)
        raise
    plan = session.make_due_plan()
    row = plan.row_for(report.batch_size)
    if row.probe is not None and session.unary_probes.take_step(row.probe):
        row = session.core.row_for_batch(report.batch_size)
    return service_pb2.DecideResponse(
        drafter=row.arm.drafter,
        gamma=row.arm.gamma,
        reason=reason_to_proto(row.reason),
        reason_detail=plan.reason_detail,
        epoch=plan.epoch,
        drafter_asleep=row.drafter_asleep,
    )


def _session_report(session: EngineSession, message: engine_pb2.StepReport) -> StepReport:
    """Converts a report.  Raises InvalidReportError.

    Removes the epoch and the probe of another session's plan, and the proposals of drafters that
    this version does not know.
    """
    if session.unknown_drafters:
        known_proposals = [
            part for part in message.proposals if part.drafter not in session.unknown_drafters
        ]
        kept_fields = engine_pb2.StepReport(proposals=known_proposals)
        message.ClearField("proposals")
        message.MergeFrom(kept_fields)
    if message.plan_session not in (0, session.tag):
        message.plan_epoch = message.probe_id = 0
    return report_from_proto(message)


class _SteerStream:
    """Serves one open Steer stream of a session."""

    def __init__(
        self,
        session: EngineSession,
        context: grpc.aio.ServicerContext[service_pb2.SteerRequest, service_pb2.SteerResponse],
        decision_scheduler: DecisionScheduler,
        refusal_limit: SharedRateLimit,
    ) -> None:
        self._session = session
        self._context = context
        self._decision_scheduler = decision_scheduler
        self._shared_refusal_limit, self._source = refusal_limit, callers.current_source()
        self._wake_event = asyncio.Event()
        self._rejections: list[service_pb2.ReportRejection] = []
        self._rejections_sent = asyncio.Event()
        # The cost of refusals since this stream last yielded to others, in refused reports.
        self._refusal_cost = 0.0
        self._sent_epoch = 0
        self._received = ReceivedCounts()
        # Whether a decision is requested, and the error of the last one.
        self._is_decision_scheduled = False
        self._decision_error: Exception | None = None
        # Messages with reports since the last response.
        self._unacknowledged_messages = 0

    async def run(self, first_request: service_pb2.SteerRequest) -> None:
        """Serves the stream until the client has sent its last message.

        Raises NoSessionError and ShuttingDownError if the session ends earlier.
        """
        session = self._session
        session.stream, session.received = self, self._received
        session.wake_streams()
        session.add_recording_note(record_pb2.RECORD_NOTE_KIND_STREAM_OPENED)
        _log.info("stream_opened", engine=session.engine_id, peer=self._context.peer())
        lease = session.plan.lease_seconds
        wake_up_seconds = min(lease / _WAKE_UPS_PER_LEASE, _WAKE_UP_SECONDS_MAX)
        try:
            with session.register_stream(self._wake_event):
                async with (
                    run_alongside(self._wake_regularly(wake_up_seconds), self._wake_event),
                    run_alongside(self._read(first_request), self._wake_event) as reader,
                ):
                    await self._write(reader)
        finally:
            if session.stream is self:
                session.stream = None
            session.add_recording_note(record_pb2.RECORD_NOTE_KIND_STREAM_CLOSED)
            _log.info("stream_closed", engine=session.engine_id)

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while True:
            is_input_ended = reader.done()
            if self._session.end_error is not None:
                if self._session.is_shutting_down and self._session.stream is self:
                    await self._send(self._session.plan, is_last=True)
                    # The plan should arrive before the status that ends the stream.
                    await asyncio.sleep(_LAST_PLAN_SECONDS)
                raise self._session.end_error
            if self._session.stream is not self:
                raise NoSessionError("another stream of this session took over")
            if is_input_ended:
                self._session.make_due_plan()
            elif self._session.is_plan_due and not self._is_decision_scheduled:
                self._is_decision_scheduled = True
                self._decision_scheduler.schedule(self._decide)
            if self._decision_error is not None:
                raise self._decision_error
            await self._send(self._session.plan)
            if is_input_ended:
                reader.result()
                return
            await self._wake_event.wait()
            self._wake_event.clear()

    def _decide(self) -> None:
        self._is_decision_scheduled = False
        if self._session.has_ended or self._session.stream is not self:
            return
        try:
            self._session.make_due_plan()
        except Exception as error:  # noqa: BLE001  # the writer raises it
            self._decision_error = error
        self._wake_event.set()

    async def _send(self, plan: Plan, is_last: bool = False) -> None:
        """Sends the plan, rejections and acknowledgement that the client does not have yet.

        is_last: the stream receives nothing more after this.
        """
        is_new = plan.epoch > self._sent_epoch
        if is_new or self._rejections or self._must_acknowledge or is_last:
            self._unacknowledged_messages = 0
            received = _received_to_proto(self._received)
            response = service_pb2.SteerResponse(received_so_far=received)
            if is_new:
                response.plan.CopyFrom(plan_to_proto(plan, self._session.tag))
                self._sent_epoch = plan.epoch
            if is_last:
                response.received.CopyFrom(received)
            if self._rejections:
                response.rejections.extend(self._rejections)
                self._rejections = []
                self._rejections_sent.set()
            await self._context.write(response)

    async def _read(self, request: service_pb2.SteerRequest | None) -> None:
        session = self._session
        while request is not None and not session.has_ended:
            if request.session_id != session.session_id:
                raise NoSessionError(
                    f"this stream belongs to session {session.session_id!r}, "
                    f"not to {request.session_id[:64]!r}"
                )
            session.record_contact(request.dropped_reports)
            if request.dropped_reports:
                dropped = self._received.dropped_reports + request.dropped_reports
                self._received.dropped_reports = min(dropped, COUNT_MAX)
            if request.lost:
                self._record_lost_capabilities(request.lost)
            await self._process_reports(request.reports)
            if request.reports:
                session.counters.messages += 1
                self._unacknowledged_messages += 1
            if self._has_work:
                self._wake_event.set()
            request = await read_message(self._context)

    @property
    def _has_work(self) -> bool:
        """Returns whether the reader must wake up the writer."""
        has_response = self._must_acknowledge or bool(self._rejections)
        return has_response or self._session.is_plan_due

    @property
    def _must_acknowledge(self) -> bool:
        return self._unacknowledged_messages >= _MESSAGES_IN_FLIGHT

    def _record_lost_capabilities(self, lost: Sequence[engine_pb2.LostCapability]) -> None:
        """Records lost capabilities; invalid ones are refused together."""
        try:
            known_lost_capabilities = [
                lost_capability
                for lost_capability in lost
                if lost_capability.drafter not in self._session.unknown_drafters
            ]
            self._session.record_lost_capabilities(
                lost_capabilities_from_proto(known_lost_capabilities)
            )
        except InvalidLossError as error:
            self._refuse(0, error)

    async def _process_reports(self, reports: Sequence[engine_pb2.StepReport]) -> None:
        """Processes one message's reports, until the session ends.

        Raises TooManyReportsError; none of them is used then.
        """
        if len(reports) > MESSAGE_REPORTS_MAX:
            raise TooManyReportsError(
                f"the message has {len(reports)} reports: at most {MESSAGE_REPORTS_MAX} are "
                "allowed, "
                "send them in several messages",
                field_path="reports",
            )
        deadline = monotonic() + _SLICE_SECONDS
        # Stale reports in a row are refused together.
        stale_count, session = 0, self._session
        for number, message in enumerate(reports, 1):
            if message.step <= session.newest_step:
                stale_count += 1
                continue
            if stale_count:
                self._refuse_stale(reports[number - 2].step, stale_count)
                stale_count = 0
            self._observe(message)
            if number % _CHUNK_REPORTS == 0 or monotonic() >= deadline:
                await self._yield_to_others()
                if session.has_ended:
                    return
                deadline = monotonic() + _SLICE_SECONDS
        if stale_count:
            self._refuse_stale(reports[-1].step, stale_count)
        if self._refusal_cost:
            await self._yield_to_others()

    async def _yield_to_others(self) -> None:
        """Yields to other streams, and delays a client whose reports are refused.

        A refusal costs about as much as a report.  Without a delay, a client that sends invalid
        reports as fast as it can would use most of the event loop.  Refusals beyond the session's
        own limit count against that of its source, which all its sessions share.  An engine within
        its own limit never waits.
        """
        self._wake_event.set()
        while len(self._rejections) >= _CHUNK_REPORTS:
            self._rejections_sent.clear()
            await self._rejections_sent.wait()
        cost, self._refusal_cost = self._refusal_cost, 0.0
        is_within_own_limit = not cost or self._session.refusal_bucket.try_consume(cost)
        await asyncio.sleep(
            0 if is_within_own_limit else self._shared_refusal_limit.consume(self._source, cost)
        )

    def _observe(self, message: engine_pb2.StepReport) -> None:
        self._received.reports += 1
        try:
            self._session.observe(_session_report(self._session, message), message)
        except InvalidReportError as error:
            self._session.reject(error)
            self._refuse(message.step, error)

    def _refuse_stale(self, step: int, count: int) -> None:
        """Refuses consecutive stale reports.  step: that of the last one."""
        self._received.reports += count
        before_text = f", nor do {count - 1} reports before it" if count > 1 else ""
        error = StaleReportError(
            f"step {step} does not follow step {self._session.newest_step}{before_text}: step "
            "numbers "
            "must increase"
        )
        self._session.reject(error, count)
        self._refusal_cost += STALE_REPORT_COST * (count - 1)
        self._refuse(step, error, count)

    def _refuse(self, step: int, error: SpeculationError, count: int = 1) -> None:
        kind = error_kind_of(error)
        self._refusal_cost += 1
        self._rejections.append(
            service_pb2.ReportRejection(
                step=step,
                code=kind.status.value[0],
                message=error_text(error),
                reason=kind.reason,
                count=count,
            )
        )

    async def _wake_regularly(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._wake_event.set()


def _received_to_proto(received: ReceivedCounts) -> service_pb2.Received:
    """Converts the counts of a stream."""
    return service_pb2.Received(reports=received.reports, dropped_reports=received.dropped_reports)
