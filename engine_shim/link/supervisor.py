"""Keeps an agent process running beside the engine.

A daemon thread starts the agent, waits for its end, and starts the next one after a short wait.
The engine's thread never waits for it: it takes the newest connected socket with `take_socket`.
From then on only the engine's thread uses and closes that socket, so no descriptor is closed while
in use.

The agent is started by `subprocess` without a preexec function, hence by vfork.  That is safe in a
process with many threads and fast in a process with much memory.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from engine_shim.link.errors import LinkStartError
from engine_shim.link.settings import LinkSettings

_INITIAL_BACKOFF_SECONDS: Final = 0.05
_MAX_BACKOFF_SECONDS: Final = 5.0
# After an agent that ran this long, the wait before the next one is short again.
_HEALTHY_SECONDS: Final = 10.0
_STOP_TIMEOUT_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)


class AgentSupervisor:
    """Runs `command`, and restarts it when it ends; `--fd N` and `--parent PID` are appended.

    `first_packet` is the first packet on every new socket.
    """

    def __init__(self, command: Sequence[str], first_packet: bytes) -> None:
        self._command = tuple(command)
        self._first_packet = first_packet
        self._new_sockets: deque[socket.socket] = deque()
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="speculation-agent", daemon=True)
        self.starts = 0

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent, None while no agent runs."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Starts the first agent.  Raises LinkStartError if the process cannot be started."""
        # The thread starts every agent: the parent-death signal is bound to the thread that started
        # the child, and this thread lives as long as the engine.
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise LinkStartError(
                f"the agent cannot be started ({' '.join(self._command)}): {self._start_error}"
            ) from self._start_error

    def take_socket(self) -> socket.socket | None:
        """Returns the socket of an agent that was started since the last call, or None."""
        newest = None
        with contextlib.suppress(IndexError):
            while True:
                newer = self._new_sockets.popleft()
                if newest is not None:
                    newest.close()
                newest = newer
        return newest

    def abandon_after_fork(self) -> None:
        """Closes this copy in a forked child; the engine keeps its agent."""
        # The event's lock may have been held by the thread, which does not exist in the child.
        self._stopping = threading.Event()
        self._stopping.set()
        self._process = None
        self._close_untaken_socket()

    def stop(self) -> None:
        """Ends the agent and the thread; the agent's socket should have been closed before."""
        self._stopping.set()
        self._close_untaken_socket()
        self._thread.join(_STOP_TIMEOUT_SECONDS)
        process = self._process
        if self._thread.is_alive() and process is not None:
            process.kill()
            self._thread.join(_STOP_TIMEOUT_SECONDS)

    def _run(self) -> None:
        backoff_seconds = _INITIAL_BACKOFF_SECONDS
        while not self._stopping.is_set():
            start_time = time.monotonic()
            try:
                process = self._spawn()
            except Exception as error:  # noqa: BLE001 - the thread has to outlive any failure
                if not self._started.is_set():
                    self._start_error = error
                    self._started.set()
                    return
                _log.error("the speculation agent cannot be started: %s", error)
            else:
                self._started.set()
                if self._stopping.is_set():
                    self._close_untaken_socket()
                code = process.wait()
                self._process = None
                self._close_untaken_socket()
                if self._stopping.is_set():
                    return
                _log.warning("the speculation agent ended with code %d; starting another", code)
            if time.monotonic() - start_time >= _HEALTHY_SECONDS:
                backoff_seconds = _INITIAL_BACKOFF_SECONDS
            self._stopping.wait(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)

    def _spawn(self) -> subprocess.Popen[bytes]:
        engine_end, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            engine_end.settimeout(0)
            engine_end.send(self._first_packet)
            fd = agent_end.fileno()
            process = subprocess.Popen(
                (*self._command, "--fd", str(fd), "--parent", str(os.getpid())),
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
            )
        except BaseException:
            engine_end.close()
            raise
        finally:
            # Only the agent may hold its end; otherwise the engine would not notice its death.
            agent_end.close()
        self._process = process
        self.starts += 1
        self._new_sockets.append(engine_end)
        return process

    def _close_untaken_socket(self) -> None:
        untaken_socket = self.take_socket()
        if untaken_socket is not None:
            untaken_socket.close()


def agent_command(settings: LinkSettings) -> tuple[str, ...]:
    """Returns the command that runs the agent with this interpreter."""
    return (
        sys.executable,
        "-m",
        "engine_shim.link.agent",
        f"--target={settings.sidecar}",
        f"--ca={settings.ca}",
        f"--client-certificate={settings.client_certificate}",
        f"--client-key={settings.client_key}",
        f"--token-file={settings.token_file}",
        f"--nice={settings.agent_nice}",
        f"--report-buffer={settings.report_buffer}",
        f"--report-interval-ms={settings.report_interval_ms}",
        f"--lease-max-seconds={settings.lease_max_seconds}",
    )
