"""The agent's gRPC client: introduces the engine, streams, and reconnects after an error."""

import asyncio
import secrets
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Final, TypeAlias

import grpc

from engine_shim.link.agent_socket import AgentSocket
from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.errors import LinkSettingsError, PacketError
from engine_shim.link.messages import (
    MAX_REPORT_BYTES,
    ArrivedPlan,
    SidecarState,
    encode_report_field,
    table_digest,
)
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import InFlightReports, ReportBuffer
from speculation.v1.engine_pb2 import EngineSpec
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest, SteerResponse
from speculation.v1.service_pb2_grpc import SpeculationServiceStub

# Its requests are serialized already.
_SteerCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, SteerResponse]"

_STEER: Final = "/speculation.v1.SpeculationService/Steer"
_REPORTS_PER_MESSAGE: Final = 128
# Long enough for the connection and the answer of a slow sidecar, and short enough to detect soon
# that packets do not get through.
_INTRODUCE_TIMEOUT_SECONDS: Final = 5.0
_INITIAL_BACKOFF_SECONDS: Final = 0.05
# Short enough that an engine is steered again within a second of the sidecar's return.
_MAX_BACKOFF_SECONDS: Final = 0.5
# After a session that lasted this long, the next attempt follows at once.
_GOOD_SESSION_SECONDS: Final = 2.0
# A stream without a plan for this many leases counts as dead, even if TCP reports no error.
_SILENT_LEASES: Final = 3.0
_MIN_SILENCE_SECONDS: Final = 3.0
# Bounded, because a plan may have a shorter lease than the previous one.
_MAX_SLEEP_SECONDS: Final = 0.1
# Half of the shortest lease for which keepalive messages are sent in time.
_MIN_HALF_LEASE_SECONDS: Final = 0.02
# Limits in characters: of a session's id, and of a reason that is logged.
_MAX_SESSION_ID_CHARACTERS: Final = 256
_MAX_REASON_CHARACTERS: Final = 512
# Time to read the messages that a stopping sidecar sent before it ended the stream.
_FINAL_READ_SECONDS: Final = 0.5
_REFUSAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass
class SidecarClient:
    """Keeps a session with the sidecar whenever the sidecar is available.

    lease_max_seconds: a longer lease is cut to this value, so that an engine without its sidecar
    falls back in bounded time.  secret: identifies the engine to the sidecar.
    """

    target: str
    credentials: EngineCredentials
    engine: EngineSpec
    lease_max_seconds: float
    agent_socket: AgentSocket
    buffer: ReportBuffer
    log: RateLimitedLog
    secret: str = ""
    # The reports of the last stream, until the sidecar states which of them arrived.
    _last_in_flight: InFlightReports | None = field(default=None, init=False)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        backoff_seconds = _INITIAL_BACKOFF_SECONDS
        while True:
            start_time = monotonic()
            state, code, detail = await self._run_session()
            self.agent_socket.send_state(state, code.value[0], detail)
            event = f"sidecar-{state.name.lower()}"
            self.log.warning(
                event,
                target=self.target,
                code=code.name,
                detail=detail,
                buffered_reports=len(self.buffer),
            )
            if monotonic() - start_time >= _GOOD_SESSION_SECONDS:
                backoff_seconds = _INITIAL_BACKOFF_SECONDS
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)

    async def _run_session(self) -> tuple[SidecarState, grpc.StatusCode, str]:
        """Runs one session from the introduction to its end; returns how it ended."""
        try:
            channel = self.credentials.channel(self.target)
            metadata = self.credentials.metadata()
        except OSError as error:
            detail = f"{error.filename}: {error.strerror}"
            return SidecarState.REFUSED, grpc.StatusCode.UNAUTHENTICATED, detail
        except LinkSettingsError as error:
            return SidecarState.REFUSED, grpc.StatusCode.UNAUTHENTICATED, str(error)
        async with channel:
            stub = SpeculationServiceStub(channel)
            lost_count = len(self.agent_socket.lost_capabilities)
            try:
                response = await stub.Introduce(
                    self._introduction(), timeout=_INTRODUCE_TIMEOUT_SECONDS, metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                is_refused = error.code() in _REFUSAL_CODES
                state = SidecarState.REFUSED if is_refused else SidecarState.AWAY
                return state, error.code(), error.details() or ""
            if len(response.session_id) > _MAX_SESSION_ID_CHARACTERS:
                detail = f"the session id has {len(response.session_id)} characters"
                return SidecarState.AWAY, grpc.StatusCode.OUT_OF_RANGE, detail
            if self._last_in_flight is not None:
                self._last_in_flight.return_unreceived(
                    response.received if response.HasField("received") else None
                )
            self._last_in_flight = in_flight = InFlightReports(
                self.buffer, response.session_id, response.messages_in_flight_max
            )
            # Older sidecars do not number their sessions: a random tag distinguishes them.
            tag = response.plan.session or secrets.randbits(32) or 1
            steer: grpc.aio.StreamStreamMultiCallable[bytes, SteerResponse] = channel.stream_stream(
                _STEER, response_deserializer=SteerResponse.FromString
            )
            session = _Session(self, steer(metadata=metadata), in_flight, lost_count, tag)
            # Only the tag is logged: the session's id is a secret.
            name = f"session {tag:08x}"
            self.agent_socket.send_state(SidecarState.STEERING, 0, name)
            self.log.info("sidecar-steering", target=self.target, session=name)
            if response.HasField("plan"):
                session.forward_plan(response.plan)
            code, detail = await session.run()
            return SidecarState.AWAY, code, detail

    def _introduction(self) -> IntroduceRequest:
        engine = EngineSpec(lost=self.agent_socket.lost_capabilities.all)
        engine.MergeFrom(self.engine)
        return IntroduceRequest(
            engine=engine,
            previous_session_id=""
            if self._last_in_flight is None
            else self._last_in_flight.session_id,
            engine_secret=self.secret,
        )


class _Session:
    """One Steer stream.  `run` ends when the stream ends or when no plan comes for too long.

    reported_lost_count: number of lost capabilities that this session has been sent.  tag:
    identifies the session in plans of a sidecar that does not set one.
    """

    def __init__(
        self,
        client: SidecarClient,
        call: _SteerCall,
        in_flight: InFlightReports,
        reported_lost_count: int,
        tag: int,
    ) -> None:
        self._call = call
        self._session_id = in_flight.session_id
        self._tag = tag
        self._lease_max_ms = round(client.lease_max_seconds * 1000)
        self._agent_socket = client.agent_socket
        self._buffer = client.buffer
        self._in_flight = in_flight
        self._log = client.log
        self._reported_lost_count = reported_lost_count
        self._lease_seconds = 1.0
        self._last_plan_time = monotonic()
        # The first message identifies the session: before it the sidecar sends nothing.
        self._keepalive_due = True

    def forward_plan(self, plan: Plan) -> None:
        """Forwards a plan to the engine, without its texts for people; the engine checks it."""
        arrival_ns = monotonic_ns()
        self._last_plan_time = arrival_ns * 1e-9
        plan.session = plan.session or self._tag
        plan.reason_detail = ""
        del plan.overrides[:]
        if plan.lease_ms > self._lease_max_ms:
            self._log.warning(
                "lease-cut",
                asked_seconds=plan.lease_ms * 1e-3,
                used_seconds=self._lease_max_ms * 1e-3,
                detail="SPECULATION_LEASE_MAX_SECONDS is the longest lease that the engine accepts",
            )
            plan.lease_ms = self._lease_max_ms
        try:
            self._agent_socket.send_plan(ArrivedPlan(plan, arrival_ns, table_digest(plan)))
        except PacketError as error:
            self._log.warning("plan-unusable", error=str(error))
            return
        if plan.lease_ms:
            self._lease_seconds = plan.lease_ms * 1e-3

    async def run(self) -> tuple[grpc.StatusCode, str]:
        """Runs the stream; returns the status with which it ended, and its detail."""
        # Reports that were buffered while the sidecar was unavailable are sent first.
        self._agent_socket.data_arrived.set()
        tasks = [
            asyncio.create_task(part()) for part in (self._read, self._write, self._watch_silence)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] in done:
                # A write may detect the end before the last plan has been read.
                await asyncio.wait({tasks[0]}, timeout=_FINAL_READ_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            # gRPC cancels a write on a call that it has cancelled; the call's status has the cause.
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, grpc.aio.AioRpcError):
                raise error
        if tasks[2] in done:
            silence_seconds = monotonic() - self._last_plan_time
            return grpc.StatusCode.DEADLINE_EXCEEDED, f"no plan for {silence_seconds:.1f} s"
        return await self._call.code(), await self._call.details() or "the sidecar ended the stream"

    async def _read(self) -> None:
        async for response in self._call:
            if response.HasField("plan"):
                self.forward_plan(response.plan)
            if response.HasField("received"):
                self._in_flight.received = response.received
            self._in_flight.acknowledged = (
                response.received_so_far if response.HasField("received_so_far") else None
            )
            # Reports may have waited for the acknowledgement.
            self._agent_socket.data_arrived.set()
            for rejection in response.rejections:
                self._log.warning(
                    "report-rejected",
                    step=rejection.step,
                    code=rejection.code,
                    reason=rejection.message[:_MAX_REASON_CHARACTERS],
                )

    async def _write(self) -> None:
        data_arrived = self._agent_socket.data_arrived
        while True:
            await data_arrived.wait()
            data_arrived.clear()
            while self._has_reports or self._keepalive_due or self._has_new_lost_capabilities:
                if not await self._write_message():
                    return

    async def _write_message(self) -> bool:
        """Sends buffered reports, or a keepalive message; returns False if the stream has ended.

        A message in flight when the stream breaks may have arrived: it is sent again only after the
        sidecar has stated that it did not arrive.
        """
        self._keepalive_due = False
        reports: list[bytes] = []
        if self._has_reports:
            reports = self._buffer.take_oldest(_REPORTS_PER_MESSAGE, MAX_REPORT_BYTES)
        request = SteerRequest(session_id=self._session_id, dropped_reports=self._buffer.dropped)
        if self._has_new_lost_capabilities:
            request.lost.extend(self._agent_socket.lost_capabilities.all)
            self._reported_lost_count = len(self._agent_socket.lost_capabilities)
        self._in_flight.add_message(reports, request.dropped_reports)
        try:
            await self._call.write(
                b"".join((request.SerializeToString(), *map(encode_report_field, reports)))
            )
        except asyncio.InvalidStateError:
            # The stream had ended before; its status has the cause.
            self._in_flight.mark_last_unsent()
            return False
        return True

    @property
    def _has_reports(self) -> bool:
        """Whether there are reports that the sidecar accepts now.

        A slow sidecar acknowledges late: then each message contains more reports, which the sidecar
        processes faster.
        """
        return len(self._buffer) > 0 and not self._in_flight.is_full

    @property
    def _has_new_lost_capabilities(self) -> bool:
        return len(self._agent_socket.lost_capabilities) > self._reported_lost_count

    async def _watch_silence(self) -> None:
        """Requests a keepalive message after half of the lease; returns if no plan answers."""
        last_keepalive_time = self._last_plan_time
        while True:
            half_lease_seconds = max(self._lease_seconds / 2, _MIN_HALF_LEASE_SECONDS)
            due_time = max(self._last_plan_time, last_keepalive_time) + half_lease_seconds
            now = monotonic()
            if now < due_time:
                await asyncio.sleep(min(max(due_time - now, 0.005), _MAX_SLEEP_SECONDS))
                continue
            max_silence_seconds = max(_SILENT_LEASES * self._lease_seconds, _MIN_SILENCE_SECONDS)
            if now - self._last_plan_time > max_silence_seconds:
                return
            last_keepalive_time = now
            self._keepalive_due = True
            self._agent_socket.data_arrived.set()


async def await_introduction(agent_socket: AgentSocket) -> IntroduceRequest | None:
    """Reads the introduction from the engine's socket; returns None if the engine ended first.

    Raises PacketError if the first packet is not an introduction.
    """
    introduction = asyncio.ensure_future(agent_socket.introduction())
    engine_gone = asyncio.ensure_future(agent_socket.engine_gone.wait())
    await asyncio.wait({introduction, engine_gone}, return_when=asyncio.FIRST_COMPLETED)
    engine_gone.cancel()
    if not introduction.done():
        introduction.cancel()
        return None
    return introduction.result()
