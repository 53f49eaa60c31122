"""Starts the demo's engines: ordinary SGLang servers that differ in their speculation flags alone.

Every one serves the same target in float32 (in bfloat16 even SGLang's own speculation differs from
plain decoding by rounding) with room for the same batch.  Only `steered` has SPECULATION_* in its
environment; without it the plugin is off and the engine is as if it were not installed.
"""

from lab.cpu_engine.engine_command import MODELS, eagle3_flags
from lab.cpu_engine.engine_command import engine_command as serve_command
from lab.harness.engines import Engine, Workplace, launch_engine

OFF = "off"
ADAPTIVE = "sglang-adaptive"
STEERED = "steered"
ENGINE_ID = "demo"
GAMMAS = (0, 1, 2, 3, 5, 7)
MAX_BATCH = 16

READY_SECONDS = 150.0


def static(gamma: int) -> str:
    """Names the policy that always drafts `gamma` tokens."""
    return f"static-{gamma}"


def speculation_flags(policy: str) -> list[str]:
    """Returns the flags that distinguish the engines' command lines."""
    if policy == OFF:
        return []
    draft = MODELS / "draft-mixed"
    if policy == ADAPTIVE:
        algorithm = ["--speculative-algorithm", "EAGLE3"]
        return [
            *algorithm, "--speculative-draft-model-path", str(draft), "--speculative-adaptive"
        ]  # fmt: skip
    gamma = 3 if policy == STEERED else int(policy.removeprefix("static-"))
    return eagle3_flags(draft, gamma)


def engine_command(policy: str, port: int) -> list[str]:
    """Makes the command line of an engine."""
    return serve_command(port, MAX_BATCH, speculation_flags(policy))


def engine_environment(policy: str, place: Workplace) -> dict[str, str]:
    """Makes the variables of an engine; only the steered one gets the sidecar's address."""
    if policy != STEERED:
        return {}
    return {
        "SPECULATION_SIDECAR": place.address,
        "SPECULATION_ENGINE_ID": ENGINE_ID,
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_DFLASH_MODEL_PATH": str(MODELS / "dflash"),
    }


def launch(policy: str, place: Workplace) -> Engine:
    """Starts an engine."""
    environment = engine_environment(policy, place)
    return launch_engine(policy, lambda port: engine_command(policy, port), environment, place)
