"""Reads and parses requests after the check of their caller, and within a time limit.

gRPC would wait without a limit for the message of a unary call before it calls the handler, and
would answer UNKNOWN if a message cannot be parsed.  Every handler is therefore registered as one
that reads its requests itself.  A message of a stream that cannot be parsed is passed on as
`UnreadableMessage` to its reader (`streams.read`).
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
FIRST_MESSAGE_SECONDS: Final = 10.0

Admission = Callable[[Any], AbstractAsyncContextManager[None]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnreadableMessage:
    """Represents a message that cannot be parsed."""

    reason: str

    def error(self) -> UnreadableRequestError:
        """Returns the error to raise."""
        return UnreadableRequestError(f"the request cannot be read: {self.reason}")


class AdmissionQueue:
    """Holds the calls of one server that wait for their first message.

    Each may wait for FIRST_MESSAGE_SECONDS.  If more than `capacity` calls wait, the oldest ends
    early, so that a client that sends headers without messages cannot block others.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def wait_for_first_message(self, message: Awaitable[T]) -> T:
        """Returns the first message.  Raises SilentClientError."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS) as limit:
                self._waiting[limit] = None
                if len(self._waiting) > self._capacity:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    oldest.reschedule(asyncio.get_running_loop().time())
                try:
                    return await message
                finally:
                    self._waiting.pop(limit, None)
        except TimeoutError as error:
            raise SilentClientError(
                f"this call sent no message within {FIRST_MESSAGE_SECONDS:g} s, or before too many "
                "other "
                "calls waited for theirs"
            ) from error


_current_queue: ContextVar[AdmissionQueue | None] = ContextVar("waiting_room", default=None)


async def first_message(message: Awaitable[T]) -> T:
    """Returns the first message of the current call.  Raises SilentClientError."""
    return await (_current_queue.get() or AdmissionQueue(1)).wait_for_first_message(message)


class RequestReaderInterceptor(grpc.aio.ServerInterceptor):
    """Parses the requests of servers whose callers need no check.  waiting_max: as in `Guard`."""

    def __init__(self, waiting_max: int) -> None:
        self._queue = AdmissionQueue(waiting_max)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Wraps the call's handler with the reading of its request."""
        handler = await continuation(handler_call_details)
        return None if handler is None else read_after_admission(handler, self._queue, nullcontext)


def read_after_admission(
    handler: Any, queue: AdmissionQueue, admission: Admission, bytes_max: int | None = None
) -> Any:
    """Wraps a handler of any kind with the check and the reading of its requests.

    admission: surrounds the call, and ends it if the caller may not make it.
    bytes_max: of a message; parsing a longer one would block the event loop for too long.
    """
    request_kind = "stream" if handler.request_streaming else "unary"
    response_kind = "stream" if handler.response_streaming else "unary"
    servicer_method = getattr(handler, f"{request_kind}_{response_kind}")
    # Not the unary kinds: gRPC would read their message before it calls the handler.
    make = getattr(grpc, f"stream_{response_kind}_rpc_method_handler")

    async def request(messages: Any, context: Any) -> Any:
        _current_queue.set(queue)
        if handler.request_streaming:
            return _readable_messages(messages, context)
        try:
            data = await queue.wait_for_first_message(context.read())
        except SilentClientError as error:
            await abort(context, error)
        if data is grpc.aio.EOF:
            await abort(context, UnreadableRequestError("the call ended without a request"))
        if isinstance(data, UnreadableMessage):
            await abort(context, data.error())
        return data

    async def checked(messages: Any, context: Any) -> Any:
        async with admission(context):
            return await servicer_method(await request(messages, context), context)

    async def checked_answers(messages: Any, context: Any) -> Any:
        async with admission(context):
            async for answer in servicer_method(await request(messages, context), context):
                yield answer

    is_generator = inspect.isasyncgenfunction(servicer_method)
    return make(
        checked_answers if is_generator else checked,
        lambda data: _parse_message(handler, data, bytes_max),
        handler.response_serializer,
    )


async def _readable_messages(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Yields the messages, for servicers that iterate instead of reading through the context."""
    async for message in messages:
        if isinstance(message, UnreadableMessage):
            await abort(context, message.error())
        yield message


def _parse_message(handler: Any, data: bytes, bytes_max: int | None) -> Any:
    if bytes_max is not None and len(data) > bytes_max:
        return UnreadableMessage(f"it has {len(data)} bytes: at most {bytes_max} in this call")
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        return UnreadableMessage(str(error))
