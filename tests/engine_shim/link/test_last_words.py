"""The end of a stream, in the order that gRPC may tell it: the write fails before all is read."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine_shim.link import packets
from engine_shim.link.engine_port import EnginePort
from engine_shim.link.quiet_log import QuietLog
from engine_shim.link.report_buffer import ReportBuffer
from engine_shim.link.sidecar_client import _Session
from engine_shim.link.translate import Translator
from speculation.v1.service_pb2 import SteerRequest, SteerResponse
from tests.engine_shim.link.fake_sidecar import engine_spec, plan


class EndedCall:
    """A call whose end is known while its last message is on the way."""

    def __init__(self) -> None:
        self.refused_a_write = asyncio.Event()

    async def write(self, request: SteerRequest) -> None:
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
        log, buffer = QuietLog(), ReportBuffer(8)
        port = EnginePort(agent, buffer, log, 0.0)
        call: Any = EndedCall()
        session = _Session(call, "session-1", Translator(engine_spec()), port, buffer, log)
        code, detail = await session.run()
        packet = packets.decode_plan(engine.recv(packets.MAX_PLAN_BYTES))
    assert (code, detail) == (grpc.StatusCode.UNAVAILABLE, "the sidecar is shutting down")
    assert (packet.epoch, packet.rows[0].gamma) == (9, 5)
