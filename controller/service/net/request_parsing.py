"""Reads and parses requests after the check of their caller, and within a time limit.

gRPC would wait without a limit for the message of a unary call before it calls the handler, and
would answer UNKNOWN if a message cannot be parsed.  Every handler is therefore registered as one
that reads its requests itself.  A message of a stream that cannot be parsed is passed on as
`Unreadable` to its reader (`streams.read`).
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controller.service.net.errors import SilentClientError, UnreadableRequestError, abort

# How long a call may be open before its first message arrives.
FIRST_SECONDS: Final = 10.0

Admission = Callable[[Any], AbstractAsyncContextManager[None]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Represents a message that cannot be parsed."""

    why: str

    def error(self) -> UnreadableRequestError:
        """Returns the error to raise."""
        return UnreadableRequestError(f"the request cannot be read: {self.why}")


class WaitingRoom:
    """Holds the calls of one server that wait for their first message.

    Each may wait for FIRST_SECONDS.  If more than `places` calls wait, the oldest ends early, so
    that a client that sends headers without messages cannot block others.
    """

    def __init__(self, places: int) -> None:
        self._places = max(1, places)
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def first(self, message: Awaitable[T]) -> T:
        """Returns the first message.  Raises SilentClientError."""
        try:
            async with asyncio.timeout(FIRST_SECONDS) as limit:
                self._waiting[limit] = None
                if len(self._waiting) > self._places:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    oldest.reschedule(asyncio.get_running_loop().time())
                try:
                    return await message
                finally:
                    self._waiting.pop(limit, None)
        except TimeoutError as error:
            raise SilentClientError(
                f"this call sent no message within {FIRST_SECONDS:g} s, or before too many other "
                "calls waited for theirs"
            ) from error


_room: ContextVar[WaitingRoom | None] = ContextVar("waiting_room", default=None)


async def first(message: Awaitable[T]) -> T:
    """Returns the first message of the current call.  Raises SilentClientError."""
    return await (_room.get() or WaitingRoom(1)).first(message)


class Reading(grpc.aio.ServerInterceptor):
    """Parses the requests of servers whose callers need no check.  waiting: as in `Guard`."""

    def __init__(self, waiting: int) -> None:
        self._room = WaitingRoom(waiting)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Wraps the call's handler with the reading of its request."""
        handler = await continuation(handler_call_details)
        return None if handler is None else read_after(handler, self._room, nullcontext)


def read_after(
    handler: Any, room: WaitingRoom, admission: Admission, most_bytes: int | None = None
) -> Any:
    """Wraps a handler of any kind with the check and the reading of its requests.

    admission: surrounds the call, and ends it if the caller may not make it.
    most_bytes: of a message; parsing a longer one would block the event loop for too long.
    """
    asks = "stream" if handler.request_streaming else "unary"
    answers = "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, f"{asks}_{answers}")
    # Not the unary kinds: gRPC would read their message before it calls the handler.
    make = getattr(grpc, f"stream_{answers}_rpc_method_handler")

    async def request(messages: Any, context: Any) -> Any:
        _room.set(room)
        if handler.request_streaming:
            return _each(messages, context)
        try:
            data = await room.first(context.read())
        except SilentClientError as error:
            await abort(context, error)
        if data is grpc.aio.EOF:
            await abort(context, UnreadableRequestError("the call ended without a request"))
        if isinstance(data, Unreadable):
            await abort(context, data.error())
        return data

    async def checked(messages: Any, context: Any) -> Any:
        async with admission(context):
            return await inner(await request(messages, context), context)

    async def checked_answers(messages: Any, context: Any) -> Any:
        async with admission(context):
            async for answer in inner(await request(messages, context), context):
                yield answer

    yields = inspect.isasyncgenfunction(inner)
    return make(
        checked_answers if yields else checked,
        lambda data: _parsed(handler, data, most_bytes),
        handler.response_serializer,
    )


async def _each(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Yields the messages, for servicers that iterate instead of reading through the context."""
    async for message in messages:
        if isinstance(message, Unreadable):
            await abort(context, message.error())
        yield message


def _parsed(handler: Any, data: bytes, most_bytes: int | None) -> Any:
    if most_bytes is not None and len(data) > most_bytes:
        return Unreadable(f"it has {len(data)} bytes: at most {most_bytes} in this call")
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        return Unreadable(str(error))
