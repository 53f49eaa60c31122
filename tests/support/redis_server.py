"""A real redis-server for a test: started, killed, paused, restarted."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from lab.harness.processes import free_port

PATIENCE_SECONDS = 60.0
# Of the log of a server that did not come up, in the error.
_NOTED_CHARACTERS = 1000


class RedisServer:
    """Without persistence unless asked for.  Leaving the context ends it.

    prefix: a command that runs it elsewhere, where it has the address `host`.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        kind: str = "server",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self._host = host
        self._prefix = prefix
        self._folder = folder
        self._options = options
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://{self._host}:{self.port}/0"

    def client(self, password: str | None = None) -> redis.Redis:
        return redis.Redis(
            host=self._host,
            port=self.port,
            password=password,
            decode_responses=True,
            socket_timeout=PATIENCE_SECONDS,
        )

    def start(self) -> Self:
        common = ["--port", str(self.port), "--dir", str(self._folder), "--bind", self._host]
        if self._kind == "sentinel":
            configuration = self._folder / "sentinel.conf"
            command = ["redis-server", str(configuration), "--sentinel", "--port", str(self.port)]
        else:
            command = ["redis-server", *common, "--save", "", "--appendonly", "no"]
        log = (self._folder / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [*self._prefix, *command, *self._options], stdout=log, stderr=log
            )
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return self
            except redis.exceptions.RedisError as error:
                connecting = isinstance(error, redis.exceptions.ConnectionError)
                late = time.monotonic() > end or self._process.poll() is not None
                if late or not connecting:
                    self.kill()
                    error.add_note((self._folder / "redis.log").read_text()[-_NOTED_CHARACTERS:])
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """As a machine that loses power."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Answers nothing, and keeps its connections."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
