"""Virtual time: one clock for everything, and event loops that never wait.

Each process of the world has an event loop of its own, so that one can be stopped, resumed, or
killed between any two turns of the others.
"""

import asyncio
import random
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType
from typing import Any, Final, TypeVar
from unittest.mock import patch

from controller.core.clock import VirtualClock
from controller.service import server
from controller.store import file_store
from controller.store.file_store import FileStore

T = TypeVar("T")

# Unix time at which virtual time begins.
_EPOCH: Final = 1_900_000_000.0
# Modules that read a clock by themselves.
_PRODUCT: Final = ("controller.", "engine_shim.")


class _AtOnce(ThreadPoolExecutor):
    """Runs what it is given where it is given."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 -- it is handed on, whatever it is
            done.set_exception(error)
        return done


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers go by a virtual clock; it never waits."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        super().__init__()
        self.set_default_executor(_AtOnce())
        self.faults: list[str] = []
        self.set_exception_handler(lambda _, context: self.faults.append(repr(context)))

    def time(self) -> float:
        return self._clock.now()

    def turn(self) -> bool:
        """One turn of what is ready; False when nothing was."""
        if not self.busy:
            return False
        self.call_soon(self.stop)
        self.run_forever()
        return True

    @property
    def busy(self) -> bool:
        """Whether anything can run before time advances."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        due = self.next_timer <= self._clock.now()
        return bool(ready) or due or bool(self._selector.select(0))  # type: ignore[attr-defined]

    @property
    def next_timer(self) -> float:
        """When the next timer is due; inf for none."""
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        return min(
            (timer.when() for timer in scheduled if not timer.cancelled()), default=float("inf")
        )

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs until this is done, which must not take time."""
        task = self.create_task(work)
        while not task.done():
            assert self.turn(), f"{work!r} waits for what does not come"
        return task.result()

    def end(self) -> None:
        """Ends every task, and the loop."""
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            while self.turn():
                pass
            later = self.next_timer
            if asyncio.all_tasks(self) and later < float("inf"):
                self._clock.advance(max(0.0, later - self._clock.now()) + 1e-6)
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


@contextmanager
def in_virtual_time(clock: VirtualClock) -> Iterator[None]:
    """Lets the product read this clock, and draw the same random numbers every time.

    Whatever a module of the product took from `time` by name is replaced too.
    """

    def wall() -> float:
        return _EPOCH + clock.now()

    clocks: dict[Callable[[], float], Callable[[], float]] = {
        time.monotonic: clock.now,
        time.monotonic_ns: lambda: round(clock.now() * 1e9),
        time.time: wall,
        time.time_ns: lambda: round(wall() * 1e9),
    }
    seeded = random.Random(0)
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name == "time" or name.startswith(_PRODUCT):
                for attribute, value in list(vars(module).items()):
                    if type(value) is BuiltinFunctionType and value in clocks:
                        stack.enter_context(patch.object(module, attribute, clocks[value]))
        for owner, attribute, instead in (
            (secrets, "token_hex", lambda length: seeded.randbytes(length).hex()),
            (random, "uniform", seeded.uniform),
            (file_store, "ThreadPoolExecutor", _AtOnce),
            (server, "_make_store", lambda settings: FileStore(settings.state_path, wall)),
        ):
            stack.enter_context(patch.object(owner, attribute, instead))
        yield
