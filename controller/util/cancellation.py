"""Ends background tasks reliably."""

import asyncio
from collections.abc import Iterable
from typing import Any

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
