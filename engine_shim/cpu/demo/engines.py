"""The demo's engines: ordinary SGLang servers that differ in their speculation flags alone.

Every one serves the same target in float32 (in bfloat16 even SGLang's own speculation differs from
plain decoding by rounding) with room for the same batch.  Only `steered` has SPECULATION_* in its
environment; without it the plugin is off and the engine is as if it were not installed.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_shim.cpu.demo.processes import Child, answers_http
from engine_shim.cpu.demo.sidecar import Sidecar
from engine_shim.cpu.ports import free_port

OFF = "off"
ADAPTIVE = "sglang-adaptive"
STEERED = "steered"
ENGINE_ID = "demo"
GAMMAS = (0, 1, 2, 3, 5, 7)
MAX_BATCH = 16

_MODELS = Path(__file__).parents[1] / "models"
_READY_SECONDS = 150.0


def static(gamma: int) -> str:
    """Name of the policy that always drafts `gamma` tokens."""
    return f"static-{gamma}"


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where the demo keeps things: logs for people, sockets and the profile for itself."""

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


def speculation_flags(policy: str) -> list[str]:
    """What distinguishes the engines' command lines."""
    if policy == OFF:
        return []
    flags = [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(_MODELS / "draft-mixed"),
    ]  # fmt: skip
    if policy == ADAPTIVE:
        return [*flags, "--speculative-adaptive"]
    gamma = 3 if policy == STEERED else int(policy.removeprefix("static-"))
    return [
        *flags,
        "--speculative-num-steps", str(gamma),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(gamma + 1),
    ]  # fmt: skip


def engine_command(policy: str, port: int) -> list[str]:
    """How that engine is started."""
    return [
        sys.executable, "-m", "engine_shim.cpu.serve",
        "--model-path", str(_MODELS / "target"),
        "--dtype", "float32",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--max-running-requests", str(MAX_BATCH),
        "--max-total-tokens", "16384",
        "--context-length", "2048",
        "--random-seed", "1",
        "--skip-server-warmup",
        "--log-level-http", "warning",
        # Four engines share the machine; the ones that wait must leave it alone.
        "--sleep-on-idle",
        *speculation_flags(policy),
    ]  # fmt: skip


def engine_environment(policy: str, place: Workplace) -> dict[str, str | None]:
    """Only the steered engine knows of the sidecar."""
    inherited = {name: None for name in os.environ if name.startswith("SPECULATION_")}
    if policy != STEERED:
        return dict(inherited)
    return {
        **inherited,
        "SPECULATION_SIDECAR": place.address,
        "SPECULATION_ENGINE_ID": ENGINE_ID,
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_DFLASH_MODEL_PATH": str(_MODELS / "dflash"),
    }


def launch(policy: str, place: Workplace) -> Engine:
    """Starts an engine; `wait_ready` waits for it."""
    port = free_port()
    child = Child(
        f"engine {policy}",
        engine_command(policy, port),
        place.log(policy),
        engine_environment(policy, place),
    )
    return Engine(policy, f"http://127.0.0.1:{port}", child)


def wait_ready(engine: Engine, tick: Callable[[], None]) -> None:
    """Until the engine has generated a token.  Raises EngineFailedError."""
    engine.child.wait_until(lambda: answers_http(f"{engine.url}/health"), _READY_SECONDS, tick)


def launch_sidecar(place: Workplace) -> Child:
    """Starts `controller serve` on a unix socket in the scratch folder."""
    inherited = {name: None for name in os.environ if name.startswith("CONTROLLER_")}
    return Child(
        "the sidecar",
        [sys.executable, "-m", "controller.cli", "serve"],
        place.log("sidecar"),
        {
            **inherited,
            "CONTROLLER_ADDRESS": place.address,
            "CONTROLLER_METRICS_PORT": "0",
        },
    )


def wait_serving(child: Child, sidecar: Sidecar) -> None:
    """Until the sidecar answers.  Raises EngineFailedError."""
    child.wait_until(sidecar.serving, timeout_seconds=20.0)


def profile_command(place: Workplace, engine: Engine, budget_seconds: float) -> list[str]:
    """How the steered engine's step costs are measured."""
    return [
        sys.executable, "-m", "controller.cli", "profile",
        "--sidecar", place.address,
        "--engine-id", ENGINE_ID,
        "--engine-url", engine.url,
        "--output", str(place.profile),
        "--budget", str(budget_seconds),
    ]  # fmt: skip
