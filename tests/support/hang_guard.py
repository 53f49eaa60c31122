"""Ends a test that hangs where pytest-timeout cannot, and says which tests ran when a run is ended.

pytest-timeout raises an exception in the main thread, once.  Code that catches it may never end,
and neither may a call into C that never returns, or a teardown that hangs after the exception.
"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import psutil
import pytest

# Seconds for a test to clean up after its timeout, before its process is ended.
GRACE_SECONDS = 120.0
# Seconds for workers to write their stacks.
STACKS_SECONDS = 1.0


def guard(config: pytest.Config) -> None:
    """Guards the process that runs tests, or the one that gives them to workers."""
    plugin = RunningTests() if config.getoption("numprocesses", None) else HangGuard()
    config.pluginmanager.register(plugin)


class HangGuard:
    """Ends this process, with the stacks of all threads, if one test exceeds its time by far.

    A plugin of pytest for the process that runs tests.  pytest-xdist then fails the test by name
    and starts another worker.
    """

    def __init__(self) -> None:
        # The tests' own output is captured; pytest-xdist puts another object in place of stderr.
        self._output = os.dup(2)
        # When the test must have ended; between tests there is no limit.
        self._limit = math.inf
        # Asked for by `RunningTests`.
        faulthandler.register(signal.SIGUSR1, file=self._output, all_threads=True)
        sys.addaudithook(_refuse_forks)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limits the whole test: setup, call and teardown."""
        marker, config = item.get_closest_marker("timeout"), item.config
        timeout_seconds = config.getoption("timeout")
        if timeout_seconds is None:
            timeout_seconds = config.getini("timeout")
        seconds = float(marker.args[0] if marker else timeout_seconds)
        # 0 means no limit, as it does for pytest-timeout.
        self._limit = time.monotonic() + seconds + GRACE_SECONDS if seconds else math.inf
        self._arm()
        try:
            return (yield)
        finally:
            self._limit = math.inf
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """pytest itself cancels the timer whenever a test has failed; its teardown is still due."""
        self._arm()

    def _arm(self) -> None:
        remaining_seconds = max(1.0, self._limit - time.monotonic())
        if remaining_seconds < math.inf:
            faulthandler.dump_traceback_later(remaining_seconds, file=self._output, exit=True)


class RunningTests:
    """Names the tests that run, with the stacks of their processes, when SIGTERM ends a run.

    A plugin of pytest for the process that the workers of pytest-xdist report to.
    """

    def __init__(self) -> None:
        self._start_times: dict[str, float] = {}
        signal.signal(signal.SIGTERM, self._end)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A worker begins a test."""
        self._start_times[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        self._start_times.pop(nodeid, None)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        for nodeid, start_time in self._start_times.items():
            print(
                f"\nrunning for {time.monotonic() - start_time:.0f} s: {nodeid}",
                file=sys.__stderr__,
            )
        for child in psutil.Process().children():
            # It would end a process that does not expect it; one may have ended by itself.
            with contextlib.suppress(OSError, psutil.Error):
                if _catches(child.pid, signal.SIGUSR1):
                    child.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _refuse_forks(event: str, _arguments: tuple[object, ...]) -> None:
    """A hook of the interpreter, which it calls before it forks; starting a program is no fork."""
    if event == "os.fork":
        raise RuntimeError(
            "a test forks its own process: gRPC waits in os.fork(), with the interpreter, for "
            "threads of its own that may wait for the interpreter; start a program instead"
        )


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
