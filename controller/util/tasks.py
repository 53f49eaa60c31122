"""Runs the tasks of a process so that none of them ends unnoticed, and ends them reliably.

    Supervisor        runs tasks for the lifetime of the process: whenever one ends, for any
                      reason, it logs and counts this, and restarts the task after a pause; health
                      checks and metrics read its `states`
    BackgroundTasks   runs short work in the background

`supervise_thread` keeps a thread running.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import structlog

# A task that has ended is restarted after the first pause.  The pause doubles, up to the longest,
# if the task soon ends again, so that a permanent fault costs little.
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 30.0
# A restarted task counts as down until it has run for this time.
SETTLED_SECONDS: Final = 1.0
# After running for this time, a task starts from the first pause again.
RECOVERED_SECONDS: Final = 60.0
# Interval at which a thread is checked.
_LOOK_SECONDS: Final = 0.5
# Interval between two cancellations of a task that has not ended.
_AGAIN_SECONDS: Final = 0.5

_log = structlog.get_logger(__name__)

# Runs until it is cancelled.
Work: TypeAlias = Callable[[], Awaitable[None]]

_T = TypeVar("_T")


class TaskEndedError(Exception):
    """A task that should run until it is cancelled has ended."""


@dataclass(slots=True)
class TaskState:
    """State of one task.

    fault: why it has ended, "" while it runs.  For an exception it has only the type, because all
    readers of the sidecar's health see it; the log has the text.  failures: since the start.
    """

    fault: str = ""
    failures: int = 0


class Supervisor:
    """Keeps tasks running until `cancel_tasks`.  Call all methods on the event loop's thread."""

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
        """Starts a task and keeps it running until `cancel_tasks`."""
        assert name not in self._tasks, name
        self._states.setdefault(name, TaskState())
        self._start(name, work, 0.0)

    def run_all(self, tasks: Mapping[str, Work]) -> None:
        """Starts several tasks, by name."""
        for name, work in tasks.items():
            self.run(name, work)

    def cancel(self, name: str) -> None:
        """Cancels a task; it is restarted, as after any other fault."""
        self._tasks[name].cancel()

    async def stop(self) -> None:
        """Ends all tasks, and returns when they have ended."""
        ending, self._tasks = self._tasks, {}
        await cancel_tasks(ending.values())

    def _start(self, name: str, work: Work, pause: float) -> None:
        task = asyncio.get_running_loop().create_task(self._run_after(name, work, pause))
        self._tasks[name] = task
        began = time.monotonic() + pause
        task.add_done_callback(functools.partial(self._start_again, name, work, pause, began))

    async def _run_after(self, name: str, work: Work, pause: float) -> None:
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        settling = loop.call_later(SETTLED_SECONDS, self._mark_settled, name)
        try:
            await work()
        finally:
            settling.cancel()

    def _start_again(
        self, name: str, work: Work, pause: float, began: float, task: asyncio.Task[None]
    ) -> None:
        if self._tasks.get(name) is not task:
            return  # `cancel_tasks` has cancelled it
        if task.cancelled():
            self._record_failure(name, TaskEndedError("it was cancelled"))
        else:
            self._record_failure(name, task.exception() or TaskEndedError("it returned"))
        recovered = time.monotonic() - began >= RECOVERED_SECONDS
        longer = 2 * pause if pause and not recovered else FIRST_PAUSE_SECONDS
        self._start(name, work, min(longer, LONGEST_PAUSE_SECONDS))

    def _mark_settled(self, name: str) -> None:
        state = self._states[name]
        if state.fault:
            state.fault = ""
            _log.info("task_runs_again", task=name)

    def _record_failure(self, name: str, error: BaseException) -> None:
        state = self._states[name]
        state.failures += 1
        state.fault = str(error) if isinstance(error, TaskEndedError) else type(error).__name__
        _log.error("task_failed", task=name, failures=state.failures, exc_info=error)


async def supervise_thread(thread: threading.Thread, start: Callable[[], object]) -> None:
    """Watches a thread; when it has ended, restarts it and raises TaskEndedError."""
    while thread.is_alive():  # noqa: ASYNC110  # a thread's end sets no event
        await asyncio.sleep(_LOOK_SECONDS)
    start()
    raise TaskEndedError("its thread has ended")


class BackgroundTasks:
    """Background tasks of one owner; failures are logged.

    Call all methods on the event loop's thread.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task.  name: of the work, for the log."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def join(self) -> None:
        """Waits until all tasks that run now have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, patience_seconds: float = 0.0) -> None:
        """Waits for the running tasks for the given time, and cancels those that remain."""
        if self._tasks and patience_seconds:
            await asyncio.wait(self._tasks, timeout=patience_seconds)
        await cancel_tasks(self._tasks)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_work_failed", work=task.get_name(), exc_info=error)


async def cancel_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and returns when all have ended.

    It cancels repeatedly, because a client library may mistake a cancellation for its own timeout.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)


async def run_to_completion(work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of work that cannot be interrupted, such as that of a thread.

    If the caller is cancelled meanwhile, this waits for the work to end, and then raises
    CancelledError.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
