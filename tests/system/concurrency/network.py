"""gRPC's place between agents and a sidecar: whole messages in order, held back or cut off at will.

The agent's generated stub and the sidecar's servicer are the real ones, and so are the bytes; this
is the channel under the one and the server over the other.  What gRPC promises is kept: messages
of a call arrive in order, and after a cut nothing more of it arrives.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, cast

import grpc
import grpc.aio

from controller.core.errors import SpeculationError
from controller.service.net.errors import abort
from controller.service.rpc.steering import SpeculationServicer
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest

# Messages of one stream that may be under way before a writer waits.
_WINDOW = 4

Read = Callable[[bytes], Any]
Write = Callable[[Any], bytes]
Witness = Callable[[str, str, str, Any], None]


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class AbortedError(Exception):
    """A servicer ended a call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Network:
    """Messages under way, to the sidecar and from it.  `held`: those directions do not move.

    witness: told of every message as the sidecar sends it ("sent"), as an agent takes it up
    ("taken") and as the sidecar takes one up ("read"); with the engine and the session, which for
    an introduction is the one before it.
    """

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self.up: deque[tuple[Channel, Callable[[], None]]] = deque()
        self.down: deque[tuple[Channel, Callable[[], None]]] = deque()
        self.held: set[str] = set()
        self.server: Server | None = None
        self.channels: list[Channel] = []

    def deliver(self) -> bool:
        """Everything that may move arrives; False when nothing did."""
        moved = False
        for name, queue in (("up", self.up), ("down", self.down)):
            while queue and name not in self.held:
                channel, arrive = queue.popleft()
                if not channel.vanished:
                    arrive()
                moved = True
        return moved

    def cut(self, channel: "Channel", arriving: int) -> None:
        """Breaks a connection after `arriving` more of its messages have reached the sidecar."""
        mine = [arrive for owner, arrive in self.up if owner is channel]
        for arrive in mine[:arriving]:
            arrive()
        self.forget(channel)
        for call in list(channel.calls):
            if self.server is not None:
                self.server.drop(call)
            call.end(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    def forget(self, channel: "Channel") -> None:
        """What is under way on a connection is lost."""
        for queue in (self.up, self.down):
            kept = [item for item in queue if item[0] is not channel]
            queue.clear()
            queue.extend(kept)


class Channel:
    """What `grpc.aio.insecure_channel` gives an agent, as far as the stub uses it."""

    def __init__(self, network: Network, engine: str) -> None:
        self._network = network
        self.engine = engine
        # Nothing more comes through, and neither end notices.
        self.vanished = False
        self.calls: list[Call] = []
        network.channels.append(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in list(self.calls):
            call.cancel()
        self._network.channels.remove(self)

    def unary_unary(
        self, _: str, request_serializer: Write, response_deserializer: Read
    ) -> Callable[..., Awaitable[Any]]:
        async def introduce(request: Any, *, timeout: float, metadata: object) -> Any:  # noqa: ASYNC109 -- the stub's
            call = self._open(response_deserializer)
            raw = request_serializer(request)
            call.session = request.previous_session_id
            call.up(lambda server: server.introduce(call, raw))
            try:
                async with asyncio.timeout(timeout):
                    async for answer in call:
                        return answer
            except TimeoutError:
                call.cancel()
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
            raise AssertionError("an answer or an error comes first")

        return introduce

    def stream_stream(
        self, _: str, request_serializer: object = None, *, response_deserializer: Read
    ) -> Callable[..., "Call"]:
        """Takes requests that are serialized already, as agents send them."""

        def steer(metadata: object) -> Call:
            call = self._open(response_deserializer)
            call.up(lambda server: server.steer(call))
            return call

        return steer

    def _open(self, read: Read) -> "Call":
        call = Call(self._network, self, read)
        self.calls.append(call)
        if self._network.server is None:
            call.end(grpc.StatusCode.UNAVAILABLE, "no server listens")
        return call


class Call:
    """The agent's end of a call."""

    def __init__(self, network: Network, channel: Channel, read: Read) -> None:
        self._network, self.channel = network, channel
        self._deserialize = read
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._status = (grpc.StatusCode.OK, "")
        self.unread = 0
        self.session = ""

    def up(self, arrive: "Callable[[Server], None]") -> None:
        def arrives() -> None:
            if self._network.server is not None:
                arrive(self._network.server)

        self._network.up.append((self.channel, arrives))

    def done(self) -> bool:
        return self._ended.is_set()

    async def write(self, raw: bytes) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        self.session = SteerRequest.FromString(raw).session_id
        self.unread += 1
        self.up(lambda server: server.message(self, raw))
        try:
            while self.unread > _WINDOW and not self.done():
                self._room.clear()
                await self._room.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            raise _error(*self._status)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (raw := await self._came.get()) is not None:
            message = self._deserialize(raw)
            self._network.witness("taken", self.channel.engine, self.session, message)
            yield message
        if self._status[0] is not grpc.StatusCode.OK:
            raise _error(*self._status)

    async def code(self) -> grpc.StatusCode:
        await self._ended.wait()
        return self._status[0]

    async def details(self) -> str:
        await self._ended.wait()
        return self._status[1]

    def cancel(self) -> None:
        if not self.done():
            self.up(lambda server: server.drop(self))
            self.end(grpc.StatusCode.CANCELLED, "cancelled by the client")

    def was_read(self) -> None:
        """The sidecar has taken a message up: there is room for another."""
        self.unread -= 1
        self._room.set()

    def arrive(self, raw: bytes) -> None:
        if not self.done():
            self._came.put_nowait(raw)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done():
            self._status = (code, details)
            self.channel.calls.remove(self)
            self._ended.set()
            self._room.set()
            self._came.put_nowait(None)


class _Context:
    """The servicer's end of a call."""

    def __init__(self, network: Network, call: Call) -> None:
        self._network, self._call = network, call
        self.came: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sent_epoch = 0

    async def read(self) -> Any:
        raw = await self.came.get()
        if raw is None:
            return grpc.aio.EOF
        call, request = self._call, SteerRequest.FromString(raw)
        self._network.down.append((call.channel, call.was_read))
        self._network.witness("read", call.channel.engine, call.session, request)
        return request

    async def write(self, response: Any) -> None:
        if response.HasField("plan"):
            assert response.plan.epoch > self._sent_epoch, "a plan twice on one stream"
            self._sent_epoch = response.plan.epoch
        self._network.witness("sent", self._call.channel.engine, self._call.session, response)
        raw = response.SerializeToString()
        self._network.down.append((self._call.channel, lambda: self._call.arrive(raw)))

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()
    ) -> None:
        del trailing_metadata  # the agent reads none
        raise AbortedError(code, details)

    def peer(self) -> str:
        return "unix:"


class Server:
    """What `grpc.aio.server` is to a servicer; `faults`: what it raised and did not mean to."""

    def __init__(
        self, network: Network, loop: asyncio.AbstractEventLoop, servicer: SpeculationServicer
    ) -> None:
        self._network, self._loop, self._servicer = network, loop, servicer
        self._contexts: dict[Call, _Context] = {}
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self.faults: list[str] = []

    def introduce(self, call: Call, raw: bytes) -> None:
        async def handle(context: Any) -> None:
            answer = await self._servicer.Introduce(IntroduceRequest.FromString(raw), context)
            await context.write(answer)

        self._begin(call, handle)

    def steer(self, call: Call) -> None:
        async def handle(context: Any) -> None:
            await self._servicer.Steer(cast("Any", None), context)

        self._begin(call, handle)

    def message(self, call: Call, raw: bytes) -> None:
        if call in self._contexts:
            self._contexts[call].came.put_nowait(raw)

    def drop(self, call: Call) -> None:
        """The connection, or the call, has ended."""
        if call in self._tasks:
            self._tasks.pop(call).cancel()
            del self._contexts[call]

    async def stop(self, grace: float) -> None:
        """As of a gRPC server."""
        del grace

    def _begin(self, call: Call, handle: Callable[[Any], Awaitable[None]]) -> None:
        context = self._contexts[call] = _Context(self._network, call)
        self._tasks[call] = self._loop.create_task(self._handle(call, handle, context))

    async def _handle(
        self, call: Call, handle: Callable[[Any], Awaitable[None]], context: _Context
    ) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            try:
                await handle(context)
            except SpeculationError as refused:  # as the guard ends a call
                await abort(cast("Any", context), refused)
        except AbortedError as aborted:
            code, details = aborted.code, aborted.details
        except Exception as error:  # noqa: BLE001 -- gRPC answers UNKNOWN, whatever it is
            self.faults.append(repr(error))
            code, details = grpc.StatusCode.UNKNOWN, repr(error)
        self._tasks.pop(call, None)
        self._contexts.pop(call, None)
        self._network.down.append((call.channel, lambda: call.end(code, details)))
