"""Keeps the long-lived tasks of a process running: none of them ends unseen.

    run("overrides", keep)   starts a task; whenever it ends, by whatever cause, this is logged and
                             counted, and it is started again after a pause
    states                   what health checks and metrics read

Only `end` ends a task.  Work on a thread is kept running by `keep_thread`.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import structlog

from controller.util import cancellation

# A task that has ended is started again after the first pause; the pause doubles with each end that
# follows soon, up to the longest, so that a lasting fault costs next to nothing.
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 30.0
# A task that was started again counts as down until it has run for so long.
SETTLED_SECONDS: Final = 1.0
# A task that has run for so long starts from the first pause again.
RECOVERED_SECONDS: Final = 60.0
# How often a thread is looked at.
_LOOK_SECONDS: Final = 0.5

_log = structlog.get_logger(__name__)

# Runs until it is cancelled.
Work: TypeAlias = Callable[[], Awaitable[None]]


class TaskEndedError(Exception):
    """Work that should run until it is cancelled has come to an end."""


@dataclass(slots=True)
class TaskState:
    """Holds the state of one task.

    fault: what has ended it, "" while it runs; of an error, the type only, because whoever may read
    the sidecar's health sees it, and the text stands in the log.  failures: since the start.
    """

    fault: str = ""
    failures: int = 0


class Supervisor:
    """See the module.  Every method belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, TaskState] = {}

    @property
    def states(self) -> Mapping[str, TaskState]:
        """Returns the state of every task that was started, by its name."""
        return MappingProxyType(self._states)

    def faults(self) -> dict[str, str]:
        """Returns the tasks that are down, and why."""
        return {name: state.fault for name, state in self._states.items() if state.fault}

    def run(self, name: str, work: Work) -> None:
        """Starts a task and keeps it running until `end`."""
        assert name not in self._tasks, name
        self._states.setdefault(name, TaskState())
        self._start(name, work, 0.0)

    def run_all(self, tasks: Mapping[str, Work]) -> None:
        """Starts several tasks, by name."""
        for name, work in tasks.items():
            self.run(name, work)

    def cancel(self, name: str) -> None:
        """Cancels what a task does at present; it is started again, as after any other fault."""
        self._tasks[name].cancel()

    async def end(self) -> None:
        """Ends all tasks, and returns when they have ended."""
        ending, self._tasks = self._tasks, {}
        await cancellation.end(ending.values())

    def _start(self, name: str, work: Work, pause: float) -> None:
        task = asyncio.get_running_loop().create_task(self._run_after(name, work, pause))
        self._tasks[name] = task
        began = time.monotonic() + pause
        task.add_done_callback(functools.partial(self._start_again, name, work, pause, began))

    async def _run_after(self, name: str, work: Work, pause: float) -> None:
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        settling = loop.call_later(SETTLED_SECONDS, self._settle, name)
        try:
            await work()
        finally:
            settling.cancel()

    def _start_again(
        self, name: str, work: Work, pause: float, began: float, task: asyncio.Task[None]
    ) -> None:
        if self._tasks.get(name) is not task:
            return  # `end` has ended it
        if task.cancelled():
            self._fail(name, TaskEndedError("it was cancelled"))
        else:
            self._fail(name, task.exception() or TaskEndedError("it returned"))
        recovered = time.monotonic() - began >= RECOVERED_SECONDS
        longer = 2 * pause if pause and not recovered else FIRST_PAUSE_SECONDS
        self._start(name, work, min(longer, LONGEST_PAUSE_SECONDS))

    def _settle(self, name: str) -> None:
        state = self._states[name]
        if state.fault:
            state.fault = ""
            _log.info("task_runs_again", task=name)

    def _fail(self, name: str, error: BaseException) -> None:
        state = self._states[name]
        state.failures += 1
        state.fault = str(error) if isinstance(error, TaskEndedError) else type(error).__name__
        _log.error("task_failed", task=name, failures=state.failures, exc_info=error)


async def keep_thread(thread: threading.Thread, start: Callable[[], object]) -> None:
    """Watches a thread; when it has ended, starts it again and raises TaskEndedError."""
    while thread.is_alive():  # noqa: ASYNC110  # a thread's end sets no event
        await asyncio.sleep(_LOOK_SECONDS)
    start()
    raise TaskEndedError("its thread has ended")
