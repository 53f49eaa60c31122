"""Shared parts of bidirectional calls: the order of decisions, reads, and background tasks."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar, cast

import grpc.aio

from controller.service.net import request_parsing
from controller.service.net.request_parsing import UnreadableMessage

Request = TypeVar("Request")


class DecisionScheduler:
    """Runs one decision at a time.

    A decision takes as long as a dozen reports.  After each one the event loop stays free for
    reports for as long as the decision took, so that decisions use at most half of it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_idle = True

    def schedule(self, decide: Callable[[], None]) -> None:
        """Calls `decide`, which must not raise, in turn: at once if no other decision waits."""
        self._waiting.append(decide)
        if self._is_idle:
            self._run_next()

    def _run_next(self) -> None:
        self._is_idle = not self._waiting
        if self._is_idle:
            return
        began = monotonic()
        self._waiting.popleft()()
        asyncio.get_running_loop().call_later(monotonic() - began, self._run_next)


async def read_message(context: grpc.aio.ServicerContext[Request, Any]) -> Request | None:
    """Returns the client's next message; None after the last one.

    Raises UnreadableRequestError for a message that cannot be parsed.
    """
    message: object = await context.read()
    if isinstance(message, UnreadableMessage):
        raise message.error()
    return None if message is grpc.aio.EOF else cast("Request", message)


async def read_first_message(context: grpc.aio.ServicerContext[Request, Any]) -> Request | None:
    """Reads a stream's first message, within a time limit.

    Raises SilentClientError, and the errors of `read_message`.
    """
    message: Any = await request_parsing.first_message(read_message(context))
    return cast("Request | None", message)


@asynccontextmanager
async def run_alongside(
    coroutine: Coroutine[Any, Any, None], event: asyncio.Event
) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a coroutine during the block; sets `event` at its end, cancels it after the block."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda _: event.set())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            # Retrieves the error: the block has raised it, or ended for another reason.
            task.exception()
