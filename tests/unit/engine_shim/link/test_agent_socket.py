"""The agent's end on a real socket pair; the test holds the engine's end."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from engine_shim.link import packets
from engine_shim.link.agent_socket import AgentSocket
from engine_shim.link.errors import PacketError
from engine_shim.link.packets import PlanPacket, RowEntry, SidecarState
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import ReportBuffer


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


def plan(epoch: int) -> PlanPacket:
    return PlanPacket(1, epoch, 0, 1000, 1, 0, (RowEntry(8, 0, 3, asleep=False, probe=None),))


def report(step: int) -> bytes:
    return packets.encode_report(packets.ReportPacket(step, 1, 1, 0, 0, (1,), 0.1, 0, 0, 0))


async def read(engine: socket.socket) -> bytes:
    async with asyncio.timeout(60):
        return await asyncio.get_running_loop().sock_recv(engine, 4096)


async def test_the_first_packet_is_the_introduction_and_the_others_are_reports():
    async with ported() as (port, buffer, engine):
        engine.send(packets.encode_hello(b"spec"))
        engine.send(report(1))
        engine.send(b"garbage")
        engine.send(report(2))
        assert await port.introduction() == b"spec"
        await port.arrived.wait()
        assert [r.step for r in buffer.take(9)] == [1, 2]
        assert buffer.dropped == 1


async def test_a_first_packet_that_is_no_introduction_is_refused():
    async with ported() as (port, _, engine):
        engine.send(report(1))
        with pytest.raises(PacketError, match="kind 2 where 1 was expected"):
            await port.introduction()


async def test_an_engine_that_reads_nothing_finds_the_newest_plan_when_it_does():
    async with ported() as (port, _, engine):
        for epoch in range(1, 5001):
            port.send_plan(plan(epoch))
        epochs: list[int] = []
        while not epochs or epochs[-1] < 5000:
            epochs.append(packets.decode_plan(await read(engine)).epoch)
        assert epochs == sorted(epochs)
        assert len(epochs) < 5000


async def test_a_state_is_told_once_for_each_change():
    async with ported() as (port, _, engine):
        for state in (SidecarState.AWAY, SidecarState.AWAY, SidecarState.STEERING):
            port.send_state(state, 14, "text")
        port.send_plan(plan(1))
        states = [packets.decode_event(await read(engine)).state for _ in range(2)]
        assert states == [SidecarState.AWAY, SidecarState.STEERING]
        assert packets.decode_plan(await read(engine)).epoch == 1


async def test_a_resting_port_reads_what_piled_up_at_once():
    async with ported(rest_seconds=1.0) as (port, buffer, engine):
        engine.send(packets.encode_hello(b"spec"))
        await port.introduction()
        seen = []
        for step in range(1, 21):
            engine.send(report(step))
            await asyncio.sleep(0)
            seen.append(len(buffer))
        async with asyncio.timeout(60):
            await port.arrived.wait()
        assert seen == [0] * 20
        assert len(buffer) == 20


async def test_a_resting_port_looks_by_itself_while_reports_come_and_is_woken_after_a_pause():
    async with ported(rest_seconds=0.01) as (port, buffer, engine):
        engine.send(packets.encode_hello(b"spec"))
        await port.introduction()
        woken = asyncio.get_running_loop()._selector.get_map  # type: ignore[attr-defined]
        for step in range(1, 21):
            engine.send(report(step))
            async with asyncio.timeout(60):
                await port.arrived.wait()
            port.arrived.clear()
            assert port._peer.fileno() not in woken()
        async with asyncio.timeout(60):
            while port._peer.fileno() not in woken():  # noqa: ASYNC110  # the kernel's list, no event
                await asyncio.sleep(0.01)
        engine.send(report(21))
        async with asyncio.timeout(60):
            await port.arrived.wait()
        assert [r.step for r in buffer.take(99)] == list(range(1, 22))


@pytest.mark.parametrize("rest_seconds", [0.0, 0.01])
@pytest.mark.parametrize("unread", [False, True])
async def test_a_gone_engine_is_noticed(unread, rest_seconds):
    async with ported(rest_seconds) as (port, _, engine):
        if unread:
            port.send_plan(plan(1))
        engine.close()
        async with asyncio.timeout(60):
            await port.gone.wait()
        port.send_plan(plan(2))
        port.send_state(SidecarState.AWAY, 0, "")
