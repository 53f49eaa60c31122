"""Runs child processes, each with a log file, a readiness check, and an end.

Every child leads its own session, so that what it started itself (an engine's scheduler, the
shim's agent) goes with it.  When this process is killed, a guard ends those sessions.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from lab.harness.errors import EngineFailedError
from lab.harness.orphan_guard import OrphanGuard

_TAIL_LINES = 25
_TERM_SECONDS = 2.0
_PREFERRED_NICE = -10
_GUARD = OrphanGuard()

# Returns a process with the attributes and methods of `subprocess.Popen`.
Popen = Callable[..., Any]
# Below the ports that Linux assigns (32768 and up), and below those that SGLang takes (22000 to
# 29999): a port from those ranges may be in use before the server binds it.
_PORTS = range(10_000, 20_000)
# The last ports that this process has drawn: some may not be bound yet.
_DRAWN_PORTS: deque[int] = deque(maxlen=1000)
# Two test processes with the same seed would draw the same ports.
_RANDOM = random.SystemRandom()


class Child:
    """A running command; its output goes to `log`.  Leaving the context ends it and its children.

    name: for messages.  environment: added to this process's own; a None value takes one away.
    popen: starts the process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str | None] | None = None,
        popen: Popen = subprocess.Popen,
    ) -> None:
        self.name = name
        self.log = log
        variables = dict(os.environ)
        for key, value in (environment or {}).items():
            if value is None:
                variables.pop(key, None)
            else:
                variables[key] = value
        log.parent.mkdir(parents=True, exist_ok=True)
        # A signal that raises between the fork and this point would leave an untracked child.
        with log.open("wb") as output, _signals_deferred():
            self._process: subprocess.Popen[bytes] = popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
            _GUARD.watch(self.pid)

    @property
    def pid(self) -> int:
        """The id of the process, which is also that of its group."""
        return self._process.pid

    def raise_priority(self) -> bool:
        """Raises the priority of the process and its future children; False if not permitted.

        Call it right after the start: a thread that runs already keeps its priority.
        """
        return raise_priority(os.PRIO_PGRP, self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def terminate(self) -> None:
        """Asks the whole group to end, and does not wait for it."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Asks the whole group to end, and kills it after two seconds."""
        self.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_SECONDS)
        finally:
            # Also what the process left behind; its group lives as long as any member does.
            self._signal(signal.SIGKILL)
            self._process.wait()
            _GUARD.forget(self.pid)

    def kill(self) -> None:
        """Kills the whole group at once, as a machine that runs out of memory would."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        """Raises EngineFailedError, with the log's tail, when the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineFailedError(f"{self.name} ended with status {code}.\n{self.tail()}")

    def wait(self, timeout_seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Waits for a command that ends by itself; raises EngineFailedError unless it succeeds."""
        self.wait_until(lambda: self._process.poll() == 0, timeout_seconds, tick, "was not done")

    def wait_until(
        self,
        ready: Callable[[], bool],
        timeout_seconds: float,
        tick: Callable[[], None] = lambda: None,
        complaint: str = "was not ready",
    ) -> None:
        """Waits until `ready()`; raises EngineFailedError when the child dies or takes too long."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            ended = self._process.poll() is not None
            if ready():
                return
            if ended:
                self.check()
            if time.monotonic() > deadline:
                raise EngineFailedError(
                    f"{self.name} {complaint} after {timeout_seconds:.0f} s.\n{self.tail()}"
                )
            tick()
            time.sleep(0.2)

    def tail(self) -> str:
        """The last lines of the log, and where it is."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- the end of {self.log}:", *(f"    {line}" for line in lines)])

    def last_line(self) -> str:
        """The newest line of the log."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def raise_priority(kind: int, target_id: int) -> bool:
    """Raises the priority of a process or a process group, where the machine permits it.

    Linux weighs whole sessions against each other where it groups them (sched_autogroup_enabled),
    and then a session has a priority of its own.
    """
    try:
        os.setpriority(kind, target_id, _PREFERRED_NICE)
        group = _autogroup(target_id)
        if group.exists():
            group.write_text(str(_PREFERRED_NICE))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def raised_priority() -> Iterator[None]:
    """Prefers this process, and what it starts meanwhile, in a `with` block or as a decorator."""
    niceness, session_niceness = os.getpriority(os.PRIO_PROCESS, 0), _session_niceness()
    raise_priority(os.PRIO_PROCESS, 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            if session_niceness:
                _autogroup(0).write_text(session_niceness)


def _autogroup(pid: int) -> Path:
    return Path(f"/proc/{pid or os.getpid()}/autogroup")


def _session_niceness() -> str:
    """Reads this session's niceness; "" where sessions have none."""
    with contextlib.suppress(OSError):
        # "/autogroup-NUMBER nice NICENESS", or nothing at all.
        return "".join(_autogroup(0).read_text().split()[-1:])
    return ""


def end_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that every context is left and every child ended."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delivers SIGTERM and SIGINT at the end of the block instead of within it.

    The handlers are replaced and the signals are not masked, because a child inherits the mask.
    Python runs handlers in the main thread only, so other threads need nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGINT)
        # A child inherits what is ignored; None is a handler that Python cannot put back.
        if (handler := signal.getsignal(number)) not in {signal.SIG_IGN, None}
    }
    for number in handlers:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signal_number in arrived:
            signal.raise_signal(signal_number)


def answers_http(url: str) -> bool:
    """True when a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  # our own engine
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port of this host that is free now, and is unlikely to be taken soon.

    A process does not return any of its last 1,000 ports again.
    """
    for port in _RANDOM.sample(_PORTS, k=len(_PORTS)):
        if port in _DRAWN_PORTS:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _DRAWN_PORTS.append(port)
        return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")
