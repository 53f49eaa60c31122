"""Runs short work beside everything else; what fails is logged and not lost.

What has to run for as long as the process does belongs to `supervisor`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from controller.util import cancellation

_log = structlog.get_logger(__name__)


class BackgroundTasks:
    """Holds what is under way for one owner.  Every method belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins the work.  name: of the work, for the log."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def join(self) -> None:
        """Returns when everything has ended that is under way now."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, patience_seconds: float = 0.0) -> None:
        """Waits for what is under way, for the time given, and cancels the rest."""
        if self._tasks and patience_seconds:
            await asyncio.wait(self._tasks, timeout=patience_seconds)
        await cancellation.end(self._tasks)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_work_failed", work=task.get_name(), exc_info=error)
