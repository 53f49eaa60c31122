"""Starting engines, the sidecar and `controller profile` for a run, and waiting for them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.harness.ports import free_port
from lab.harness.processes import Child, answers_http
from lab.harness.sidecar import SidecarHandle

_SIDECAR_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where a run keeps things: logs for people, sockets and the profile for itself."""

    output: Path
    scratch: Path

    @property
    def address(self) -> str:
        """Of the sidecar."""
        return f"unix:{self.scratch / 'controller.sock'}"

    @property
    def profile(self) -> Path:
        """The cost profile that is measured; not kept from an earlier, interrupted run."""
        return self.scratch / "profile.json"

    def log(self, name: str) -> Path:
        """Of one child process."""
        return self.output / "logs" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    policy: str
    url: str
    child: Child


def launch_engine(
    policy: str,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    place: Workplace,
) -> Engine:
    """Starts an engine; `wait_ready` waits for it.

    command: from the port to serve on.  environment: what it knows of SPECULATION_*, and more.
    """
    port = free_port()
    inherited = {name: None for name in os.environ if name.startswith("SPECULATION_")}
    child = Child(
        f"engine {policy}", command(port), place.log(policy), {**inherited, **environment}
    )
    return Engine(policy, f"http://127.0.0.1:{port}", child)


def wait_ready(engine: Engine, seconds: float, tick: Callable[[], None]) -> None:
    """Until the engine has generated a token.  Raises EngineFailedError."""
    engine.child.wait_until(lambda: answers_http(f"{engine.url}/health"), seconds, tick)


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
    """Until the sidecar answers.  Raises EngineFailedError."""
    child.wait_until(sidecar.serving, timeout_seconds=_SIDECAR_SECONDS)


def wait_introduced(engine: Engine, sidecar: SidecarHandle) -> None:
    """Until the engine has introduced itself to the sidecar.  Raises EngineFailedError."""
    engine.child.wait_until(
        sidecar.introduced,
        timeout_seconds=_SIDECAR_SECONDS,
        complaint="did not introduce itself to the sidecar (is the project installed?)",
    )


def profile_command(
    place: Workplace, engine: Engine, engine_id: str, budget_seconds: float, *options: str
) -> list[str]:
    """How the steered engine's step costs are measured."""
    return [
        sys.executable, "-m", "controller.cli", "profile",
        "--sidecar", place.address,
        "--engine-id", engine_id,
        "--engine-url", engine.url,
        "--output", str(place.profile),
        "--budget", str(budget_seconds),
        *options,
    ]  # fmt: skip
