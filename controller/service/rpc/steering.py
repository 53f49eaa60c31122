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
    within,
)
from controller.core.plan import Plan
from controller.core.step_report import StepReport
from controller.service.net import callers
from controller.service.net.errors import (
    Context,
    NoSessionError,
    TooManyReportsError,
    kind_of,
    message_of,
)
from controller.service.net.limits import SharedAllowance, Turns
from controller.service.rpc import streams
from controller.service.rpc.streams import DecisionTurns, beside, read
from controller.service.sessions.counters import COUNT_MAX, Received
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.wire.engines import all_lost_from_proto, engine_from_proto, leave_out_unknown
from controller.wire.plans import plan_to_proto, reason_to_proto
from controller.wire.reports import report_from_proto
from speculation.v1 import engine_pb2, record_pb2, service_pb2, service_pb2_grpc

# Introductions that may wait: as many as the default limit of engines.
_INTRODUCTIONS_WAITING: Final = 1024
# The most reports in a message.
MESSAGE_REPORTS: Final = 4096
# Other streams get their turn after this many reports of a message, or after this time.  The number
# is also the limit of rejections in one response.
_CHUNK = 256
_SLICE_SECONDS = 0.002
# Refusals per second, and burst, of one source.  The unit is a refused report, which takes about
# 40 us: 2 % of a core for each source.  A stale report that is refused together with others costs
# little more than its parsing.
REFUSALS_A_SECOND: Final = 500.0
REFUSALS_AT_ONCE: Final = 500.0
STALE_PRICE: Final = 1 / 32
# Unacknowledged messages with reports that an engine may have: an engine that is served late sends
# fewer, with more reports in each, which take less time.  They are acknowledged together.
_MESSAGES_IN_FLIGHT: Final = 2
# How often per lease an idle stream checks whether a plan is due.
_LOOKS_PER_LEASE = 8
_LOOK_SECONDS_MAX = 0.5
_PARTING_SECONDS = 0.1

_log = structlog.get_logger(__name__)


class SpeculationServicer(service_pb2_grpc.SpeculationServiceServicer):
    """Serves Introduce, Steer and Decide."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._introductions = Turns(_INTRODUCTIONS_WAITING)
        self._decisions = DecisionTurns()
        self._refusals = SharedAllowance(REFUSALS_A_SECOND, REFUSALS_AT_ONCE)

    async def Introduce(
        self, request: service_pb2.IntroduceRequest, context: Context
    ) -> service_pb2.IntroduceResponse:
        """Opens a session."""
        session = await self._introductions.take(lambda: self._introduced(request))
        before = self._registry.received_in(request.previous_session_id)
        return service_pb2.IntroduceResponse(
            session_id=session.session_id,
            plan=plan_to_proto(session.plan, session.tag),
            received=None if before is None else _received_to_proto(before),
            messages_in_flight_max=_MESSAGES_IN_FLIGHT,
        )

    def _introduced(self, request: service_pb2.IntroduceRequest) -> EngineSession:
        with within("engine"):
            left_out = leave_out_unknown(request.engine)
            spec = engine_from_proto(request.engine)
        callers.require_engine(spec.engine_id)
        holder = EngineIdentity.of(callers.calling(), request.engine_secret)
        session = self._registry.introduce(spec, holder)
        if left_out:
            session.left_out = left_out
            _log.warning(
                "drafters_left_out",
                engine=spec.engine_id,
                drafters=sorted(left_out),
                detail="this sidecar does not know their kind and steers without them: upgrade it",
            )
        return session

    async def Steer(  # type: ignore[override]  # grpc.aio also takes a coroutine that reads and writes through its context
        self,
        request_iterator: AsyncIterator[service_pb2.SteerRequest],
        context: grpc.aio.ServicerContext[service_pb2.SteerRequest, service_pb2.SteerResponse],
    ) -> None:
        """Receives reports and sends plans, until either side ends the stream."""
        first = await streams.first(context)
        if first is None:
            return
        session = self._registry.by_token(first.session_id)
        callers.require_engine(session.engine_id)
        await _SteerStream(session, context, self._decisions, self._refusals).run(first)

    async def Decide(
        self, request: service_pb2.DecideRequest, context: Context
    ) -> service_pb2.DecideResponse:
        """Processes one report, and returns the choice for its batch size."""
        session = self._registry.by_token(request.session_id)
        callers.require_engine(session.engine_id)
        session.contact()
        return _decide(session, request.report)


def _decide(session: EngineSession, message: engine_pb2.StepReport) -> service_pb2.DecideResponse:
    try:
        with within("report"):
            report = session.unary.identify(_report_in(session, message))
            session.observe(report, message)
    except InvalidReportError as error:
        session.reject(error)
        raise
    plan = session.advance()
    row = plan.row_for(report.batch_size)
    if row.probe is not None and session.unary.take(row.probe):
        row = session.core.decide(report.batch_size)
    return service_pb2.DecideResponse(
        drafter=row.arm.drafter,
        gamma=row.arm.gamma,
        reason=reason_to_proto(row.reason),
        reason_detail=plan.reason_detail,
        epoch=plan.epoch,
        drafter_asleep=row.drafter_asleep,
    )


def _report_in(session: EngineSession, message: engine_pb2.StepReport) -> StepReport:
    """Converts a report.  Raises InvalidReportError.

    Removes the epoch and the probe of another session's plan, and the proposals of drafters that
    this version does not know.
    """
    if session.left_out:
        known = [part for part in message.proposals if part.drafter not in session.left_out]
        rest = engine_pb2.StepReport(proposals=known)
        message.ClearField("proposals")
        message.MergeFrom(rest)
    if message.plan_session not in (0, session.tag):
        message.plan_epoch = message.probe_id = 0
    return report_from_proto(message)


class _SteerStream:
    """Serves one open Steer stream of a session."""

    def __init__(
        self,
        session: EngineSession,
        context: grpc.aio.ServicerContext[service_pb2.SteerRequest, service_pb2.SteerResponse],
        decisions: DecisionTurns,
        refusals: SharedAllowance,
    ) -> None:
        self._session = session
        self._context = context
        self._decisions = decisions
        self._shared_refusals, self._source = refusals, callers.source()
        self._bell = asyncio.Event()
        self._rejections: list[service_pb2.ReportRejection] = []
        self._flushed = asyncio.Event()
        # The cost of refusals since this stream last yielded to others, in refused reports.
        self._price = 0.0
        self._sent_epoch = 0
        self._received = Received()
        # Whether a decision is requested, and the error of the last one.
        self._is_asked = False
        self._failure: Exception | None = None
        # Messages with reports since the last response.
        self._unacknowledged = 0

    async def run(self, first: service_pb2.SteerRequest) -> None:
        """Serves the stream until the client has sent its last message.

        Raises NoSessionError and ShuttingDownError if the session ends earlier.
        """
        session = self._session
        session.stream, session.received = self, self._received
        session.ring()
        session.note(record_pb2.RECORD_NOTE_KIND_STREAM_OPENED)
        _log.info("stream_opened", engine=session.engine_id, peer=self._context.peer())
        lease = session.plan.lease_seconds
        look_seconds = min(lease / _LOOKS_PER_LEASE, _LOOK_SECONDS_MAX)
        try:
            with session.listening(self._bell):
                async with (
                    beside(self._look(look_seconds), self._bell),
                    beside(self._read(first), self._bell) as reader,
                ):
                    await self._write(reader)
        finally:
            if session.stream is self:
                session.stream = None
            session.note(record_pb2.RECORD_NOTE_KIND_STREAM_CLOSED)
            _log.info("stream_closed", engine=session.engine_id)

    async def _write(self, reader: asyncio.Task[None]) -> None:
        while True:
            done = reader.done()
            if self._session.ended is not None:
                if self._session.parting and self._session.stream is self:
                    await self._send(self._session.plan, last=True)
                    # The plan should arrive before the status that ends the stream.
                    await asyncio.sleep(_PARTING_SECONDS)
                raise self._session.ended
            if self._session.stream is not self:
                raise NoSessionError("another stream of this session took over")
            if done:
                self._session.advance()
            elif self._session.is_plan_due and not self._is_asked:
                self._is_asked = True
                self._decisions.ask(self._decide)
            if self._failure is not None:
                raise self._failure
            await self._send(self._session.plan)
            if done:
                reader.result()
                return
            await self._bell.wait()
            self._bell.clear()

    def _decide(self) -> None:
        self._is_asked = False
        if self._session.is_over or self._session.stream is not self:
            return
        try:
            self._session.advance()
        except Exception as error:  # noqa: BLE001  # the writer raises it
            self._failure = error
        self._bell.set()

    async def _send(self, plan: Plan, last: bool = False) -> None:
        """Sends the plan, rejections and acknowledgement that the client does not have yet.

        last: the stream receives nothing more after this.
        """
        news = plan.epoch > self._sent_epoch
        if news or self._rejections or self._must_acknowledge or last:
            self._unacknowledged = 0
            received = _received_to_proto(self._received)
            rejections, self._rejections = self._rejections, []
            self._flushed.set()
            self._sent_epoch = plan.epoch
            await self._context.write(
                service_pb2.SteerResponse(
                    plan=plan_to_proto(plan, self._session.tag) if news else None,
                    rejections=rejections,
                    received=received if last else None,
                    received_so_far=received,
                )
            )

    async def _read(self, request: service_pb2.SteerRequest | None) -> None:
        session = self._session
        while request is not None and not session.is_over:
            if request.session_id != session.session_id:
                raise NoSessionError(
                    f"this stream belongs to session {session.session_id!r}, "
                    f"not to {request.session_id[:64]!r}"
                )
            session.contact(request.dropped_reports)
            dropped = self._received.dropped + request.dropped_reports
            self._received.dropped = min(dropped, COUNT_MAX)
            if request.lost:
                self._lose(request.lost)
            await self._take(request.reports)
            if request.reports:
                session.counters.messages += 1
                self._unacknowledged += 1
            if self._has_work:
                self._bell.set()
            request = await read(self._context)

    @property
    def _has_work(self) -> bool:
        """Returns whether the reader must wake up the writer."""
        news = self._must_acknowledge or bool(self._rejections)
        return news or self._session.is_plan_due

    @property
    def _must_acknowledge(self) -> bool:
        return self._unacknowledged >= _MESSAGES_IN_FLIGHT

    def _lose(self, lost: Sequence[engine_pb2.LostCapability]) -> None:
        """Records lost capabilities; invalid ones are refused together."""
        try:
            known = [loss for loss in lost if loss.drafter not in self._session.left_out]
            self._session.lose(all_lost_from_proto(known))
        except InvalidLossError as error:
            self._refuse(0, error)

    async def _take(self, reports: Sequence[engine_pb2.StepReport]) -> None:
        """Processes one message's reports, until the session ends.

        Raises TooManyReportsError; none of them is used then.
        """
        if len(reports) > MESSAGE_REPORTS:
            raise TooManyReportsError(
                f"the message has {len(reports)} reports: at most {MESSAGE_REPORTS} are allowed, "
                "send them in several messages",
                field_path="reports",
            )
        until = monotonic() + _SLICE_SECONDS
        # Stale reports in a row are refused together.
        stale, session = 0, self._session
        for number, message in enumerate(reports, 1):
            if session.is_over:
                return
            if message.step <= session.newest_step:
                stale += 1
                continue
            if stale:
                self._refuse_stale(reports[number - 2].step, stale)
                stale = 0
            self._fold(message)
            if number % _CHUNK == 0 or monotonic() >= until:
                await self._give_way()
                until = monotonic() + _SLICE_SECONDS
        if stale:
            self._refuse_stale(reports[-1].step, stale)
        if self._price:
            await self._give_way()

    async def _give_way(self) -> None:
        """Yields to other streams, and delays a client whose reports are refused.

        A refusal costs about as much as a report.  Without a delay, a client that sends invalid
        reports as fast as it can would use most of the event loop.  Refusals beyond the session's
        own limit count against that of its source, which all its sessions share.  An engine within
        its own limit never waits.
        """
        self._bell.set()
        while len(self._rejections) >= _CHUNK:
            self._flushed.clear()
            await self._flushed.wait()
        price, self._price = self._price, 0.0
        is_free = not price or self._session.refusals.take(price)
        await asyncio.sleep(0 if is_free else self._shared_refusals.take(self._source, price))

    def _fold(self, message: engine_pb2.StepReport) -> None:
        self._received.reports += 1
        try:
            self._session.observe(_report_in(self._session, message), message)
        except InvalidReportError as error:
            self._session.reject(error)
            self._refuse(message.step, error)

    def _refuse_stale(self, step: int, count: int) -> None:
        """Refuses consecutive stale reports.  step: that of the last one."""
        self._received.reports += count
        others = f", nor do {count - 1} reports before it" if count > 1 else ""
        error = StaleReportError(
            f"step {step} does not follow step {self._session.newest_step}{others}: step numbers "
            "must increase"
        )
        self._session.reject(error, count)
        self._price += STALE_PRICE * (count - 1)
        self._refuse(step, error, count)

    def _refuse(self, step: int, error: SpeculationError, count: int = 1) -> None:
        kind = kind_of(error)
        self._price += 1
        self._rejections.append(
            service_pb2.ReportRejection(
                step=step,
                code=kind.status.value[0],
                message=message_of(error),
                reason=kind.reason,
                count=count,
            )
        )

    async def _look(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._bell.set()


def _received_to_proto(received: Received) -> service_pb2.Received:
    """Converts the counts of a stream."""
    return service_pb2.Received(reports=received.reports, dropped_reports=received.dropped)
