"""Starts engines, the sidecar and `controller profile` for a run, and plays streams on them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from lab.harness.engine_environment import without_crash_dumps
from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.load_generator import (
    REQUEST_SECONDS,
    Play,
    Progress,
    StreamPhase,
    play,
    play_overlapping,
)
from lab.harness.processes import Child, Popen, answers_http, free_port
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal

_SIDECAR_SECONDS = 60.0
# Beyond the profile's own budget: waiting for load to begin, the fit, a slow machine.
_PROFILE_SPARE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of a run: `output` keeps logs for people, `scratch` sockets and the profile."""

    output: Path
    scratch: Path

    @classmethod
    @contextmanager
    def temporary(cls, output: Path, name: str) -> Iterator[Self]:
        """Makes the folders of the run of that name; `scratch` goes when the context ends."""
        prefix = f"speculation-{name}-"
        with TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch:
            yield cls(output, Path(scratch))

    @property
    def address(self) -> str:
        """The sidecar's address."""
        return f"unix:{self.scratch / 'controller.sock'}"

    @property
    def profile(self) -> Path:
        """The cost profile that is measured; not kept from an earlier, interrupted run."""
        return self.scratch / "profile.json"

    def log(self, name: str) -> Path:
        """The log file of the child process of that name."""
        return self.output / "logs" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    policy: str
    url: str
    child: Child

    def wait_ready(
        self,
        seconds: float,
        tick: Callable[[], None] = lambda: None,
        sidecar: SidecarHandle | None = None,
    ) -> None:
        """Waits until the engine has generated a token and is known to its sidecar, if it has one.

        Raises EngineFailedError.
        """
        self.child.wait_until(lambda: answers_http(f"{self.url}/health"), seconds, tick)
        if sidecar is not None:
            self.child.wait_until(
                sidecar.is_introduced,
                _SIDECAR_SECONDS,
                complaint="did not introduce itself to the sidecar (is the plugin installed?)",
            )

    def play(
        self,
        stream: Sequence[StreamPhase],
        progress: Progress | None = None,
        request_seconds: float = REQUEST_SECONDS,
    ) -> Play:
        """Plays a stream on the engine; an error's text ends with the last lines of its log.

        request_seconds: the longest that one may take.
        """
        return self._run_play(play(stream, self.url, progress, request_seconds))

    def play_overlapping(self, stream: Sequence[StreamPhase]) -> Play:
        """Plays a stream whose phases overlap; an error's text ends as that of `play`."""
        return self._run_play(play_overlapping(stream, self.url))

    def _run_play(self, playing: Coroutine[Any, Any, Play]) -> Play:
        try:
            return asyncio.run(playing)
        except EngineFailedError as error:
            raise EngineFailedError(f"{self.policy}: {error}\n{self.child.tail()}") from error


def launch_engine(
    policy: str,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    place: Workplace,
    popen: Popen = subprocess.Popen,
) -> Engine:
    """Starts an engine and does not wait for it.

    command: makes the command line from the port to serve on.  environment: its variables; it
    inherits no other SPECULATION_*, and ends without SGLang's dumps if it crashes, unless a
    variable asks for them.  popen: starts the process.
    """
    port = free_port()
    inherited = {name: None for name in os.environ if name.startswith("SPECULATION_")}
    variables = {**inherited, **without_crash_dumps(os.environ), **environment}
    child = Child(f"engine {policy}", command(port), place.log(policy), variables, popen)
    return Engine(policy, f"http://127.0.0.1:{port}", child)


def launch_sidecar(
    place: Workplace,
    metrics_port: int = 0,
    environment: Mapping[str, str] | None = None,
    log: str = "sidecar",
) -> Child:
    """Starts `controller serve` on a unix socket in the scratch folder."""
    inherited = {name: None for name in os.environ if name.startswith("CONTROLLER_")}
    return Child(
        "the sidecar",
        [sys.executable, "-m", "controller.cli", "serve"],
        place.log(log),
        {
            **inherited,
            "CONTROLLER_ADDRESS": place.address,
            "CONTROLLER_METRICS_PORT": str(metrics_port),
            **(environment or {}),
        },
    )


def wait_serving(child: Child, sidecar: SidecarHandle) -> None:
    """Waits until the sidecar answers.  Raises EngineFailedError."""
    child.wait_until(sidecar.is_serving, _SIDECAR_SECONDS)


def measure_profile(
    place: Workplace,
    engine: Engine,
    sidecar: SidecarHandle,
    budget_seconds: float,
    *options: str,
    output: Path | None = None,
    update: Callable[[str], None] = lambda _: None,
) -> str:
    """Measures the engine's step costs with `controller profile`; returns the profile as JSON.

    output: the profile's file, None for the run's own.  update: called with the newest line.
    Raises EngineFailedError when the command fails, HarnessError when the sidecar does not use the
    profile.
    """
    output = output or place.profile
    command = [
        sys.executable, "-m", "controller.cli", "profile",
        "--sidecar", place.address,
        "--engine-id", sidecar.engine_id,
        "--engine-url", engine.url,
        "--output", str(output),
        "--budget", str(budget_seconds),
        *options,
    ]  # fmt: skip
    with Child("controller profile", command, place.log("profile")) as child:
        child.wait(budget_seconds + _PROFILE_SPARE_SECONDS, lambda: update(child.last_line()))
        if not sidecar.status().profile_id:
            raise HarnessError(f"the sidecar did not load the measured profile.\n{child.tail()}")
    return output.read_text()


class Harness:
    """A sidecar and engines, which end when `stack` is closed, and the streams played on them."""

    def __init__(self, place: Workplace, terminal: Terminal, stack: ExitStack) -> None:
        self._place = place
        self._terminal = terminal
        self._stack = stack
        self._engines: dict[str, Engine] = {}
        self._sidecar_child: Child | None = None

    def _start_sidecar(self, sidecar: SidecarHandle) -> None:
        self._sidecar_child = self._stack.enter_context(launch_sidecar(self._place))
        wait_serving(self._sidecar_child, sidecar)

    def engine(self, policy: str) -> Engine:
        """Returns a running engine."""
        return self._engines[policy]

    def _register_engine(self, engine: Engine) -> Engine:
        self._engines[engine.policy] = engine
        self._stack.enter_context(engine.child)
        return engine

    def _play(self, policy: str, stream: Sequence[StreamPhase], text: str) -> Play:
        with self._terminal.show_progress(text) as work:
            played = self._engines[policy].play(stream, lambda phase: work.update(phase.name))
            work.result = f"{played.tokens_per_second:.1f} tokens/s"
        for lost_request in played.lost_requests:
            self._terminal.say(f"{policy}: {lost_request}")
        if self._sidecar_child is not None:
            self._sidecar_child.check()
        return played
