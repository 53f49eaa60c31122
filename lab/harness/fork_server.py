"""Starts Python programs as forks of a process that has already imported what they need.

An interpreter that imports SGLang takes about fifteen seconds of processor time before it does
anything.  A fork server imports it once; every program that it starts begins where the imports
ended.  The server has no thread but the main one, so that forking it is safe.

    server = ForkServer("lab.cpu_engine.engine_imports", cpu_engine_env())
    process = server.start("lab.cpu_engine.serve", ["--port", "30000"], environment, folder, output)

A started program leads its own session, has the arguments, environment, module search path, working
folder and output that were asked for, and runs the module as `__main__`.  It must not depend on
variables that the preloaded modules have read while they were imported.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 1 << 20
_DATAGRAM = socket.SOCK_SEQPACKET


class ForkedProcess:
    """A program that a fork server started; the methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self._result(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.  Raises subprocess.TimeoutExpired."""
        code = self._result(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return code

    def _result(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                message = self._connection.recv(_MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return None
            self._connection.close()
            # A server that was killed reports no exit codes.
            self.returncode = json.loads(message)["code"] if message else -signal.SIGKILL
        return self.returncode


class ForkClient:
    """Starts programs through the control socket of a fork server that another process owns.

    control: the server's, whose descriptor a child process can inherit.  A program is killed when
    the server ends, and the server ends when the last process that holds its control socket closes
    it.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor of the control socket."""
        return self._control.fileno()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: int,
    ) -> ForkedProcess:
        """Runs `python -m MODULE ARGUMENTS` with its output in a file.

        folder: the working folder.  output: descriptor of an open file.  Raises RuntimeError when
        the server could not import what it was to preload.
        """
        order = {
            "argv": [module, *arguments],
            "environment": dict(environment),
            "folder": str(folder),
        }
        local_socket, server_socket = socket.socketpair(socket.AF_UNIX, _DATAGRAM)
        with server_socket, self._lock, contextlib.suppress(BrokenPipeError):
            descriptors = [output, server_socket.fileno()]
            socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)
        answer = local_socket.recv(_MESSAGE_BYTES)
        if not answer:
            local_socket.close()
            raise RuntimeError(f"the fork server has ended{self._exit_report()}")
        return ForkedProcess(json.loads(answer)["pid"], local_socket)

    def _exit_report(self) -> str:
        return ""


class ForkServer(ForkClient):
    """A process that has imported `preload`.  It ends with this one, and its programs with it.

    environment: the server's own, which modules may read while they are imported.
    """

    def __init__(self, preload: str, environment: Mapping[str, str]) -> None:
        control, server_control = socket.socketpair(socket.AF_UNIX, _DATAGRAM)
        super().__init__(control)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the server
        with server_control:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(server_control.fileno()), preload],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[server_control.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the server and what it started."""
        atexit.unregister(self.close)
        self._control.close()
        self._process.wait()
        self._log.close()

    def _exit_report(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return f" with status {code}:\n{self._log.read().decode(errors='replace')}"


class _Server:
    """The server's side: forks for each order, and tells how each program has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._programs: dict[int, socket.socket] = {}
        self._wake, self._signalled = socket.socketpair()
        self._wake.setblocking(False)  # noqa: FBT003  # its only argument
        self._signalled.setblocking(False)  # noqa: FBT003  # its only argument
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno())

    def serve(self) -> dict[str, Any] | None:
        """Returns an order in each process that was forked for it, and None at the server's end."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._control, selectors.EVENT_READ)
            ready.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._wake:
                        self._wake.recv(_MESSAGE_BYTES)
                        self._reap()
                        continue
                    message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 2)
                    if not message:
                        self._end_programs()
                        return None
                    if (order := self._fork(json.loads(message), *descriptors)) is not None:
                        return order

    def _fork(self, order: dict[str, Any], output: int, report: int) -> dict[str, Any] | None:
        pid = os.fork()
        if pid:
            os.close(output)
            self._programs[pid] = socket.socket(fileno=report)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # Sent only now: the starter may signal the program's group at once.
        with contextlib.suppress(OSError), socket.socket(fileno=report) as starter:
            starter.send(json.dumps({"pid": os.getpid()}).encode())
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        for connection in (self._control, self._wake, self._signalled, *self._programs.values()):
            connection.close()
        return order

    def _reap(self) -> None:
        while self._programs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError), self._programs.pop(pid) as report:
                report.send(json.dumps({"code": code}).encode())

    def _end_programs(self) -> None:
        for pid in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _configure_process(order: dict[str, Any], own_paths: set[str]) -> None:
    """Gives this process the environment, folder, paths and arguments of an order."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    python_path = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    inherited_paths = [path for path in sys.path if path not in own_paths]
    sys.path[:] = [order["folder"], *filter(None, python_path), *inherited_paths]
    importlib.invalidate_caches()
    sys.argv[:] = order["argv"]


def main() -> None:
    """The server, and then each program that it was forked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    own_paths = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    importlib.import_module(sys.argv[2])
    # What is imported stays: collecting garbage need not look at it again, nor copy its pages.
    gc.collect()
    gc.freeze()
    order = _Server(control).serve()
    if order is None:
        # The server has nothing to clean up, and some libraries fail if their exit handlers run.
        os._exit(0)
    _configure_process(order, own_paths)
    runpy.run_module(order["argv"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
