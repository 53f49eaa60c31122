"""Requests are parsed here and not by gRPC, which answers UNKNOWN where a message cannot be read.

A single request is parsed after the check of its caller: nothing is for those who may not call.
Messages of a stream are parsed as they come, and those that cannot be read travel as `Unreadable`
to whoever takes them (`streams.read`).
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controller.service.errors import UnreadableRequestError, abort

Check = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a message of a stream that is none."""

    why: str

    def error(self) -> UnreadableRequestError:
        """To be raised."""
        return UnreadableRequestError(f"the request cannot be read: {self.why}")


class Reading(grpc.aio.ServerInterceptor):
    """For servers whose callers need not be checked."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Puts the reading before the call's own handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else read_after(handler, None)


def read_after(handler: Any, check: Check | None) -> Any:
    """The handler with the check and the reading before it, whatever kind of call it is."""
    asks = "stream" if handler.request_streaming else "unary"
    answers = "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, f"{asks}_{answers}")
    make = getattr(grpc, f"{asks}_{answers}_rpc_method_handler")

    async def admitted(request: Any, context: Any) -> Any:
        if check is not None:
            await check(context)
        if handler.request_streaming:
            return _each(request, context)
        found = _parsed(handler, request)
        if isinstance(found, Unreadable):
            await abort(context, found.error())
        return found

    async def checked(request: Any, context: Any) -> Any:
        return await inner(await admitted(request, context), context)

    async def checked_answers(request: Any, context: Any) -> Any:
        async for answer in inner(await admitted(request, context), context):
            yield answer

    yields = inspect.isasyncgenfunction(inner)
    return make(
        checked_answers if yields else checked,
        (lambda data: _parsed(handler, data)) if handler.request_streaming else None,
        handler.response_serializer,
    )


async def _each(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """For those who iterate in the place of reading through the context."""
    async for message in messages:
        if isinstance(message, Unreadable):
            await abort(context, message.error())
        yield message


def _parsed(handler: Any, data: bytes) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        return Unreadable(str(error))
