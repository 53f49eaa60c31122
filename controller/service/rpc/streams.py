"""Shared by the bidirectional calls: reads that end, and a child task that ends with the call."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import grpc.aio

from controller.service.net import request_parsing
from controller.service.net.request_parsing import Unreadable

Request = TypeVar("Request")


async def read(context: grpc.aio.ServicerContext[Request, Any]) -> Request | None:
    """The client's next message, None once it has sent its last.

    Raises UnreadableRequestError for one that cannot be parsed.
    """
    message: object = await context.read()
    if isinstance(message, Unreadable):
        raise message.error()
    return None if message is grpc.aio.EOF else cast("Request", message)


async def first(context: grpc.aio.ServicerContext[Request, Any]) -> Request | None:
    """Reads a stream's first message, which must name its engine soon.

    Raises what `read` raises, and SilentClientError.

    Raises SilentClientError as well.
    """
    message: Any = await request_parsing.first(read(context))
    return cast("Request | None", message)


@asynccontextmanager
async def beside(
    coroutine: Coroutine[Any, Any, None], bell: asyncio.Event
) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a coroutine beside the block; sets `bell` when it ends, ends it with the block."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda _: bell.set())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            # Marks a failure as seen: the block has raised it already, or ended for another reason.
            task.exception()
