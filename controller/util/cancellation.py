"""Ends background tasks reliably."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_AGAIN_SECONDS = 0.5


async def end(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and returns when all have ended.

    It cancels repeatedly, because a client library may take a cancellation for its own time-out.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of work that cannot be interrupted, such as that of a thread.

    If the caller is cancelled meanwhile, this waits for the end of the work and ends cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
