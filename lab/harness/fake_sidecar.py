"""A scripted sidecar: a real grpc.aio server with the real stubs, in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Self

import grpc

from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import (
    DecideRequest,
    DecideResponse,
    IntroduceRequest,
    IntroduceResponse,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import (
    SpeculationServiceServicer,
    add_SpeculationServiceServicer_to_server,
)


class FakeSidecar(SpeculationServiceServicer):
    """Answers an introduction with `first_plan()`, every Steer message with `answer(request)`.

    `push` sends a plan unasked.  Start, stop and start again on the same address.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.introductions: list[EngineSpec] = []
        self.requests: list[SteerRequest] = []
        self.first_plan: Callable[[], Plan] = Plan
        self.answer: Callable[[SteerRequest], SteerResponse | None] = lambda _: None
        # "": a new one for each introduction.
        self.session_id = ""
        self.refuse_introduction: tuple[grpc.StatusCode, str] | None = None
        # 0: as a sidecar that does not know of such a limit.
        self.messages_in_flight_max = 0
        self.end_streams: tuple[grpc.StatusCode, str] | None = None
        # What the open stream sends next; what is pushed before one opens goes out on the first.
        self._out: asyncio.Queue[SteerResponse] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def reports(self) -> list[StepReport]:
        """Returns all reports that have arrived, in order."""
        return [report for request in list(self.requests) for report in request.reports]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def start(self) -> None:
        """Begins to serve."""

        async def begin() -> None:
            self._server = grpc.aio.server()
            add_SpeculationServiceServicer_to_server(self, self._server)
            assert self._server.add_insecure_port(self.target)
            await self._server.start()

        self._run(begin())

    def stop(self) -> None:
        """Ends all streams and the service."""

        async def end() -> None:
            server, self._server = self._server, None
            if server is not None:
                await server.stop(0)

        self._run(end())

    def push(self, pushed: Plan) -> None:
        """Sends a plan on the open stream."""
        self.say(SteerResponse(plan=pushed))

    def say(self, response: SteerResponse) -> None:
        """Sends a response on the open stream, or on the next one."""
        self._loop.call_soon_threadsafe(self._out.put_nowait, response)

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        """Takes an introduction, or refuses it as `refuse_introduction` says."""
        if self.refuse_introduction is not None:
            await context.abort(*self.refuse_introduction)
        self.introductions.append(request.engine)
        session_id = self.session_id or f"session-{len(self.introductions)}"
        return IntroduceResponse(
            session_id=session_id,
            plan=self.first_plan(),
            messages_in_flight_max=self.messages_in_flight_max,
        )

    async def Steer(
        self, request_iterator: AsyncIterator[SteerRequest], context: Any
    ) -> AsyncIterator[SteerResponse]:
        """Serves one stream."""

        async def take_in() -> None:
            async for request in request_iterator:
                self.requests.append(request)
                response = self.answer(request)
                if response is not None:
                    self._out.put_nowait(response)

        reading = asyncio.create_task(take_in())
        try:
            while not reading.done():
                if self.end_streams is not None:
                    await context.abort(*self.end_streams)
                try:
                    async with asyncio.timeout(0.02):
                        response = await self._out.get()
                except TimeoutError:
                    continue
                yield response
        finally:
            reading.cancel()

    async def Decide(self, request: DecideRequest, context: Any) -> DecideResponse:
        """Is not served."""
        raise NotImplementedError

    def _run(self, coroutine: Any) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.result(60)
