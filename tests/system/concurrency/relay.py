"""A relay between real agents and a real sidecar, which keeps what goes through it.

It speaks the contract to both sides and changes nothing: what one side says, and how a call ends,
the other side hears.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.service_pb2 import (
    IntroduceRequest,
    IntroduceResponse,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import SpeculationServiceStub

# ("plan", "reports", "received" (the last word) or "before" (what the next sidecar knows; None if
# nothing), session, message)
Witness = Callable[[str, str, Any], None]


class Relay(ScriptedSidecar):
    """From `address` to `sidecar`; its script is what that says.

    faults: what `witness` raised.
    """

    def __init__(self, address: str, sidecar: str, witness: Witness) -> None:
        super().__init__(address)
        self._sidecar = sidecar
        self._witness = witness
        self.faults: list[BaseException] = []
        self._streams: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Breaks every stream, on both sides."""

        async def cut() -> None:
            for stream in list(self._streams):
                stream.cancel()

        self._run_in_loop(cut())

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        async with grpc.aio.insecure_channel(self._sidecar) as channel:
            try:
                answer = await SpeculationServiceStub(channel).Introduce(request, timeout=2.0)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
        if request.previous_session_id:
            before = answer.received if answer.HasField("received") else None
            self._tell("before", request.previous_session_id, before)
        self._tell("plan", answer.session_id, answer.plan)
        return answer

    async def Steer(
        self, request_iterator: AsyncIterator[SteerRequest], context: Any
    ) -> AsyncIterator[SteerResponse]:
        session = ""
        async with grpc.aio.insecure_channel(self._sidecar) as channel:
            call = SpeculationServiceStub(channel).Steer()

            async def send() -> None:
                nonlocal session
                async for request in request_iterator:
                    session = request.session_id
                    self._tell("reports", session, request)
                    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        await call.write(request)

            sending = asyncio.create_task(send())
            this = asyncio.current_task()
            assert this is not None
            self._streams.add(this)
            try:
                async for response in call:
                    if response.HasField("plan"):
                        self._tell("plan", session, response.plan)
                    if response.HasField("received"):
                        self._tell("received", session, response.received)
                    yield response
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            finally:
                self._streams.discard(this)
                sending.cancel()

    def _tell(self, kind: str, session: str, message: Any) -> None:
        try:
            self._witness(kind, session, message)
        except BaseException as error:  # noqa: BLE001 -- it is raised again in the test's thread
            self.faults.append(error)
