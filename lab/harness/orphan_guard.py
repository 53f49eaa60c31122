"""Kills the children of this process when it has ended, however it ended.

Engines lead sessions of their own, so that nothing ends them when their parent is killed: they
would keep holding the device's memory.  A guard is a small process that waits for the end of the
one that started it, and then kills every process of the sessions that were registered with it,
grandchildren included.  It needs no cooperation of the children, and works for any thread.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

# What the guard reads at once; a message is a few bytes.
_MESSAGES_BYTES = 1 << 16
# The field of /proc/PID/stat that has the session, counted behind the name in parentheses.
_SESSION_FIELD = 3


class OrphanGuard:
    """The guard of this process; it is started when the first session is watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, session: int) -> None:
        """Has the guard kill the session's processes when this one is gone.

        session: its id, which is that of the process that leads it.
        """
        with self._lock:
            # A fork of the process that started a guard is another process, and needs its own.
            if self._owner != os.getpid():
                self._owner = os.getpid()
                self._start()
            self._send(f"+{session}\n")

    def forget(self, session: int) -> None:
        """The session has ended, and its id may become that of another."""
        with self._lock:
            if self._owner == os.getpid():
                self._send(f"-{session}\n")

    def close(self) -> None:
        """Ends the guard, and the sessions that it still watches."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._owner = 0
                self._process.communicate()

    def _start(self) -> None:
        own_pidfd = os.pidfd_open(os.getpid())
        self._process = subprocess.Popen(
            # Without site packages (-I -S), so that it starts fast and stays small.
            [sys.executable, "-I", "-S", __file__, str(own_pidfd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[own_pidfd],
            start_new_session=True,
            bufsize=0,
        )
        os.close(own_pidfd)
        atexit.register(self.close)

    def _send(self, message: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # If the guard was killed, the run continues without one.
        with suppress(BrokenPipeError):
            self._process.stdin.write(message.encode())


def kill_sessions(sessions: set[int]) -> None:
    """Kills every process of these sessions; those that are started meanwhile as well."""
    while pids := [pid for pid, session in _list_processes() if session in sessions]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _list_processes() -> list[tuple[int, int]]:
    """The id and the session of every process that has not ended."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        # The process may end while its files are read.
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in {"Z", "X"}:
                processes.append((int(folder.name), int(fields[_SESSION_FIELD])))
    return processes


def main() -> None:
    """The guard itself.  Its argument is a descriptor (pidfd) of the process to wait for."""
    owner, messages = int(sys.argv[1]), sys.stdin.fileno()
    sessions: set[int] = set()
    partial_line = b""
    while True:
        ready, _, _ = select.select([owner, messages], [], [])
        # Messages first: what was written before the end counts.
        read = os.read(messages, _MESSAGES_BYTES) if messages in ready else b""
        if not read:
            break
        *lines, partial_line = (partial_line + read).split(b"\n")
        for line in lines:
            (sessions.add if line.startswith(b"+") else sessions.discard)(int(line[1:]))
    kill_sessions(sessions)


if __name__ == "__main__":
    main()
