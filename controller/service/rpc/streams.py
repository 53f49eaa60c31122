"""Shared by bidirectional calls: turns to decide, reads that end, a task that ends with a call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar, cast

import grpc.aio

from controller.service.net import request_parsing
from controller.service.net.request_parsing import Unreadable

Request = TypeVar("Request")


class DecisionTurns:
    """One decision at a time.

    A decision takes as long as a dozen reports.  After each one the event loop is left to reports
    for as long as the decision took, so that decisions take half of it at most.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_free = True

    def ask(self, decide: Callable[[], None]) -> None:
        """Calls `decide`, which must not raise, when it is its turn: now if nobody has one."""
        self._waiting.append(decide)
        if self._is_free:
            self._next()

    def _next(self) -> None:
        self._is_free = not self._waiting
        if self._is_free:
            return
        began = monotonic()
        self._waiting.popleft()()
        asyncio.get_running_loop().call_later(monotonic() - began, self._next)


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
