"""Whatever ends a long-lived task, it is logged and counted, and the task is started again."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from controller.util import tasks as module
from controller.util.tasks import BackgroundTasks, Supervisor, supervise_thread
from tests.support.service_harness import wait_until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "SETTLED_SECONDS", 0.01)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def fails() -> None:
    raise ValueError("the first time")


async def returns() -> None:
    pass


async def is_cancelled() -> None:
    raise asyncio.CancelledError


class Work:
    """Ends in one way the first time, and then runs until it is cancelled."""

    def __init__(self, first: Callable[[], Awaitable[None]]) -> None:
        self._first = first
        self.starts = 0
        self.ended = False

    async def run(self) -> None:
        self.starts += 1
        if self.starts == 1:
            await self._first()
            return
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (fails, "ValueError"),
        (returns, "it returned"),
        (is_cancelled, "it was cancelled"),
    ],
)
async def test_a_task_that_ends_is_down_and_is_started_again(
    first: Callable[[], Awaitable[None]], fault: str, lines: list[Any]
):
    supervisor, work = Supervisor(), Work(first)
    supervisor.run("work", work.run)
    await wait_until(lambda: supervisor.states["work"].failures)
    assert supervisor.faults() == {"work": fault}
    await wait_until(lambda: not supervisor.faults())
    assert (work.starts, supervisor.states["work"].failures) == (2, 1)
    assert [line["event"] for line in lines] == ["task_failed", "task_runs_again"]
    assert {line["task"] for line in lines} == {"work"}
    await supervisor.stop()
    assert work.ended
    assert supervisor.states["work"].failures == 1


async def test_a_task_that_is_cancelled_from_outside_is_started_again():
    supervisor, work = Supervisor(), Work(asyncio.Event().wait)  # type: ignore[arg-type]
    supervisor.run("work", work.run)
    for failures in (1, 2, 3):
        # At first before it has begun, then in its pause.
        supervisor.cancel("work")
        await wait_until(lambda failures=failures: supervisor.states["work"].failures == failures)
    await wait_until(lambda: not supervisor.faults())
    await supervisor.stop()


async def test_a_task_that_fails_again_and_again_is_down_throughout_and_pauses_longer(
    monkeypatch: pytest.MonkeyPatch,
):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    supervisor = Supervisor()
    monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(asyncio, "sleep", note)
    supervisor.run("work", fails)
    while supervisor.states["work"].failures < 6:
        await sleep(0)
        assert bool(supervisor.faults()) == bool(supervisor.states["work"].failures)
    monkeypatch.undo()
    await supervisor.stop()
    assert pauses[:6] == [0.0, 0.01, 0.02, 0.04, 0.05, 0.05]


async def test_a_thread_that_ends_is_started_again():
    stop = threading.Event()
    started: list[threading.Thread] = []

    def start() -> threading.Thread:
        started.append(threading.Thread(target=stop.wait, daemon=True))
        started[-1].start()
        return started[-1]

    start()
    supervisor = Supervisor()
    supervisor.run("thread", lambda: supervise_thread(started[-1], start))
    stop.set()
    await wait_until(supervisor.faults)
    assert supervisor.faults() == {"thread": "its thread has ended"}
    stop.clear()
    await wait_until(
        lambda: len(started) > 1 and started[-1].is_alive() and not supervisor.faults()
    )
    await supervisor.stop()
    stop.set()


async def test_background_work_that_fails_is_logged(lines: list[Any]):
    tasks = BackgroundTasks()
    await asyncio.wait([tasks.start("look", fails())])
    await wait_until(lambda: not len(tasks))
    assert [(line["event"], line["work"]) for line in lines] == [("background_work_failed", "look")]


async def test_background_work_that_goes_on_is_cancelled_at_the_end(lines: list[Any]):
    tasks, work = BackgroundTasks(), Work(returns)
    work.starts = 1
    tasks.start("wait", work.run())
    await wait_until(lambda: work.starts == 2)
    await tasks.close(patience_seconds=0.01)
    assert work.ended
    assert not lines
