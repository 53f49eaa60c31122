"""The agent's end on a real socket pair; the test holds the engine's end."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from engine_shim.link.agent_socket import AgentSocket
from engine_shim.link.errors import PacketError
from engine_shim.link.messages import (
    MAX_PACKET_BYTES,
    REPORT,
    REQUEST,
    ArrivedPlan,
    SidecarState,
    read_packet,
)
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import ReportBuffer
from speculation.v1.engine_pb2 import CAPABILITY_SLEEP, EngineSpec, LostCapability, StepReport
from speculation.v1.link_pb2 import LinkState
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest
from tests.support import link_messages
from tests.unit.engine_shim.link import numbered_reports
from tests.unit.engine_shim.link.numbered_reports import step_of


@contextlib.asynccontextmanager
async def ported(
    rest_seconds: float = 0.0,
) -> AsyncIterator[tuple[AgentSocket, ReportBuffer, socket.socket]]:
    engine, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine.settimeout(0)
    buffer = ReportBuffer(100)
    port = AgentSocket(agent, buffer, RateLimitedLog(), rest_seconds)
    with engine:
        yield port, buffer, engine
        port.close()


HELLO = IntroduceRequest(engine=EngineSpec(engine_id="e"))


def plan(epoch: int) -> ArrivedPlan:
    return ArrivedPlan(link_messages.plan(epoch, 3), 0)


def report(step: int) -> bytes:
    return REPORT + numbered_reports.report(step)


async def read(engine: socket.socket) -> ArrivedPlan | LinkState:
    async with asyncio.timeout(60):
        return read_packet(await asyncio.get_running_loop().sock_recv(engine, 4096))


async def plan_read(engine: socket.socket) -> Plan:
    message = await read(engine)
    assert isinstance(message, ArrivedPlan)
    return message.plan


async def state_read(engine: socket.socket) -> LinkState:
    message = await read(engine)
    assert isinstance(message, LinkState)
    return message


async def test_the_first_packet_is_the_introduction_and_the_others_are_reports():
    async with ported() as (port, buffer, engine):
        engine.send(HELLO.SerializeToString())
        engine.send(report(1))
        engine.send(b"garbage")
        engine.send(report(2))
        assert await port.introduction() == HELLO
        await port.data_arrived.wait()
        assert [step_of(r) for r in buffer.take_oldest(9, 1000)] == [1, 2]
        assert buffer.dropped == 1


async def test_a_report_that_no_message_has_room_for_is_lost_alone():
    large = StepReport(step=1, drafter="x" * MAX_PACKET_BYTES).SerializeToString()
    async with ported() as (port, buffer, engine):
        engine.send(HELLO.SerializeToString())
        engine.send(REPORT + large)
        engine.send(report(2))
        await port.introduction()
        await port.data_arrived.wait()
        assert [step_of(r) for r in buffer.take_oldest(9, 1000)] == [2]
        assert buffer.dropped == 1


async def test_reports_that_the_engine_dropped_are_counted_and_losses_are_kept():
    loss = LostCapability(capability=CAPABILITY_SLEEP, reason="it failed")
    async with ported() as (port, buffer, engine):
        engine.send(HELLO.SerializeToString())
        engine.send(REQUEST + SteerRequest(dropped_reports=5).SerializeToString())
        engine.send(REQUEST + SteerRequest(lost=[loss]).SerializeToString())
        # No report comes like that, since it would not be read.
        engine.send(REQUEST + SteerRequest(reports=[StepReport(step=1)]).SerializeToString())
        engine.send(report(2))
        await port.introduction()
        await port.data_arrived.wait()
        assert (len(buffer), buffer.dropped, port.lost_capabilities.all) == (1, 6, [loss])


async def test_a_first_packet_that_is_no_introduction_is_refused():
    async with ported() as (port, _, engine):
        engine.send(report(1))
        with pytest.raises(PacketError, match="first packet"):
            await port.introduction()


async def test_an_engine_that_reads_nothing_finds_the_newest_plan_when_it_does():
    async with ported() as (port, _, engine):
        for epoch in range(1, 5001):
            port.send_plan(plan(epoch))
        epochs: list[int] = []
        while not epochs or epochs[-1] < 5000:
            epochs.append((await plan_read(engine)).epoch)
        assert epochs == sorted(epochs)
        assert len(epochs) < 5000


async def test_a_state_is_told_once_for_each_change():
    async with ported() as (port, _, engine):
        for state in (SidecarState.AWAY, SidecarState.AWAY, SidecarState.STEERING):
            port.send_state(state, 14, "text")
        port.send_plan(plan(1))
        states = [SidecarState((await state_read(engine)).state) for _ in range(2)]
        assert states == [SidecarState.AWAY, SidecarState.STEERING]
        assert (await plan_read(engine)).epoch == 1


async def test_a_resting_port_reads_what_piled_up_at_once():
    async with ported(rest_seconds=1.0) as (port, buffer, engine):
        engine.send(HELLO.SerializeToString())
        await port.introduction()
        seen = []
        for step in range(1, 21):
            engine.send(report(step))
            await asyncio.sleep(0)
            seen.append(len(buffer))
        async with asyncio.timeout(60):
            await port.data_arrived.wait()
        assert seen == [0] * 20
        assert len(buffer) == 20


async def test_a_resting_port_looks_by_itself_while_reports_come_and_is_woken_after_a_pause():
    async with ported(rest_seconds=0.01) as (port, buffer, engine):
        engine.send(HELLO.SerializeToString())
        await port.introduction()
        woken = asyncio.get_running_loop()._selector.get_map  # type: ignore[attr-defined]
        for step in range(1, 21):
            engine.send(report(step))
            async with asyncio.timeout(60):
                await port.data_arrived.wait()
            port.data_arrived.clear()
            assert port._peer.fileno() not in woken()
        async with asyncio.timeout(60):
            while port._peer.fileno() not in woken():  # noqa: ASYNC110  # the kernel's list, no event
                await asyncio.sleep(0.01)
        engine.send(report(21))
        async with asyncio.timeout(60):
            await port.data_arrived.wait()
        assert [step_of(r) for r in buffer.take_oldest(99, 10_000)] == list(range(1, 22))


@pytest.mark.parametrize("rest_seconds", [0.0, 0.01])
@pytest.mark.parametrize("unread", [False, True])
async def test_a_gone_engine_is_noticed(unread, rest_seconds):
    async with ported(rest_seconds) as (port, _, engine):
        if unread:
            port.send_plan(plan(1))
        engine.close()
        async with asyncio.timeout(60):
            await port.engine_gone.wait()
        port.send_plan(plan(2))
        port.send_state(SidecarState.AWAY, 0, "")


async def test_a_plan_that_is_too_large_is_not_sent_and_the_next_one_is():
    async with ported() as (port, _, engine):
        large = plan(1)
        large.plan.rows[0].drafter = "x" * MAX_PACKET_BYTES
        with pytest.raises(PacketError, match="plan 1: "):
            port.send_plan(large)
        port.send_plan(plan(2))
        assert (await plan_read(engine)).epoch == 2
