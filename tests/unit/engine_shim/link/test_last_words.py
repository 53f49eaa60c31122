"""The end of a stream, in the order that gRPC may tell it: the write fails before all is read."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from engine_shim.link.agent_socket import AgentSocket
from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.messages import MAX_PACKET_BYTES, ArrivedPlan, read_packet
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import InFlightReports, ReportBuffer
from engine_shim.link.sidecar_client import SidecarClient, _Session
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import Received, SteerResponse
from tests.support.link_messages import engine_spec, plan
from tests.unit.engine_shim.link.numbered_reports import report, step_of

LEASE_MAX_SECONDS = 60.0
TAG = 7


def client(port: AgentSocket, buffer: ReportBuffer, log: RateLimitedLog) -> SidecarClient:
    spec = engine_spec()
    credentials = EngineCredentials()
    return SidecarClient("", credentials, spec, LEASE_MAX_SECONDS, port, buffer, log)


class EndedCall:
    """A call whose end is known while its last message is on the way."""

    def __init__(self) -> None:
        self.refused_a_write = asyncio.Event()

    async def write(self, request: bytes) -> None:
        self.refused_a_write.set()
        raise asyncio.InvalidStateError("the call is over")

    async def __aiter__(self) -> AsyncIterator[SteerResponse]:
        await self.refused_a_write.wait()
        for _ in range(20):  # the loop turns a few times before the message is parsed
            await asyncio.sleep(0)
        yield SteerResponse(plan=plan(9, 5))

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "the sidecar is shutting down"


async def test_a_plan_that_came_before_the_end_is_taken_though_a_write_failed_first():
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with engine, agent:
        engine.settimeout(10)
        log, buffer = RateLimitedLog(), ReportBuffer(8)
        port = AgentSocket(agent, buffer, log, 0.0)
        call: Any = EndedCall()
        sent = InFlightReports(buffer, "session-1")
        session = _Session(client(port, buffer, log), call, sent, 0, TAG)
        code, detail = await session.run()
        passed_on = read_packet(engine.recv(MAX_PACKET_BYTES))
    assert (code, detail) == (grpc.StatusCode.UNAVAILABLE, "the sidecar is shutting down")
    assert isinstance(passed_on, ArrivedPlan)
    assert (passed_on.plan.epoch, passed_on.plan.rows[0].gamma) == (9, 5)


class TakingCall(EndedCall):
    """A call that takes one message, and then ends with these last words."""

    def __init__(self, last_words: list[SteerResponse]) -> None:
        super().__init__()
        self._last_words = last_words
        self._taken = asyncio.Event()

    async def write(self, request: bytes) -> None:
        self._taken.set()

    async def __aiter__(self) -> AsyncIterator[SteerResponse]:
        await self._taken.wait()
        for _ in range(20):  # until the write is over
            await asyncio.sleep(0)
        for words in self._last_words:
            yield words


@pytest.mark.parametrize(
    ("last_words", "again", "lost"),
    [
        ([], [], 3),
        ([SteerResponse(received_so_far=Received(reports=1))], [], 2),
        # Of a version that acknowledges nothing.
        ([SteerResponse(plan=plan(2, 5))], [], 0),
        ([SteerResponse(received=Received(reports=3))], [], 0),
        ([SteerResponse(received=Received(reports=1))], [2, 3], 0),
    ],
)
async def test_what_was_written_goes_out_again_only_if_the_sidecar_says_that_it_did_not_come(
    last_words: list[SteerResponse], again: list[int], lost: int
):
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with engine, agent:
        log, buffer = RateLimitedLog(), ReportBuffer(8)
        for step in (1, 2, 3):
            buffer.add(report(step))
        port = AgentSocket(agent, buffer, log, 0.0)
        call: Any = TakingCall(last_words)
        sent = InFlightReports(buffer, "session-1")
        session = _Session(client(port, buffer, log), call, sent, 0, TAG)
        await session.run()
    sent.return_unreceived(received=None)
    assert [step_of(kept) for kept in buffer.take_oldest(8, 1000)] == again
    assert buffer.dropped == lost


async def passed_on(*plans: Plan) -> list[ArrivedPlan]:
    """What a session sends of plans that come one after another."""
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    packets = []
    with engine, agent:
        engine.settimeout(10)
        log, buffer = RateLimitedLog(), ReportBuffer(8)
        port = AgentSocket(agent, buffer, log, 0.0)
        call: Any = EndedCall()
        sent = InFlightReports(buffer, "session-1")
        session = _Session(client(port, buffer, log), call, sent, 0, TAG)
        for plan_message in plans:
            session.forward_plan(plan_message)
            packet = read_packet(engine.recv(MAX_PACKET_BYTES))
            assert isinstance(packet, ArrivedPlan)
            packets.append(packet)
    return packets


async def test_a_plan_is_passed_on_as_it_came_without_what_is_for_people():
    came = plan(9, 5)
    came.session, came.draft_version = 5, 7
    detailed_plan = Plan()
    detailed_plan.CopyFrom(came)
    detailed_plan.reason_detail = "renewed"
    detailed_plan.overrides.append("o-1")
    (packet,) = await passed_on(detailed_plan)
    assert packet.plan == came


async def test_a_plan_that_names_no_session_is_one_of_this_session():
    (packet,) = await passed_on(plan(9, 5))
    assert packet.plan.session == TAG


async def test_renewed_plans_have_one_digest_and_other_tables_others():
    again, other = plan(10, 5, lease_ms=900), plan(11, 3)
    renewed, new = (
        packet.table_digest for packet in (await passed_on(plan(9, 5), again, other))[1:]
    )
    (first,) = await passed_on(plan(9, 5))
    assert first.table_digest == renewed != new
    assert first.table_digest


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (60_000, 60_000), (2**32 - 1, 60_000)])
async def test_a_lease_that_is_too_long_is_cut(asked: int, used: int):
    (packet,) = await passed_on(plan(1, 5, lease_ms=asked))
    assert packet.plan.lease_ms == used
