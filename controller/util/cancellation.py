"""Ending background tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_SECONDS = 0.5


async def end(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Returns when all have ended.

    They are cancelled more than once if need be: a client library may take a cancellation for a
    time-out of its own.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
