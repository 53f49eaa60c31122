"""The check's engines: SGLang servers of one shape that differ in speculation alone.

OFF           no speculation configured
STATIC        EAGLE3 with one draft length, without the plugin
PINNED        the same drafter with the plugin, held to that draft length
STEERED       both drafters, every draft length
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.cpu_engine.engine_command import eagle3_flags
from lab.cpu_engine.forking import popen
from lab.gpu_check.shapes import ModelFolders, Shape
from lab.harness.engines import Engine, Workplace, launch_engine

OFF, STATIC, PINNED, STEERED = "off", "static", "pinned", "steered"
# Loading, and preparing every draft length's graphs.
READY_SECONDS = 1200.0
# Of the GPU for the steered engine, so that another fits beside it.
_STEERED_MEMORY = 0.45
_OTHER_MEMORY = 0.75


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The shape and the place of all engines.  options: further options for SGLang."""

    shape: Shape
    models: ModelFolders
    on_cpu: bool
    options: tuple[str, ...] = ()


def command(policy: str, setting: EngineSetting, port: int) -> list[str]:
    """Makes the command line of an engine."""
    shape = setting.shape
    module = "lab.cpu_engine.serve" if setting.on_cpu else "sglang.launch_server"
    memory = _STEERED_MEMORY if policy == STEERED else _OTHER_MEMORY
    return [
        sys.executable, "-m", module,
        "--model-path", str(setting.models.target),
        "--load-format", "dummy",
        "--skip-tokenizer-init",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--max-running-requests", str(shape.max_batch),
        "--context-length", str(shape.context_length),
        "--random-seed", "1",
        "--log-level-http", "warning",
        # The engine that waits must leave the machine alone.
        "--sleep-on-idle",
        *([] if setting.on_cpu else ["--mem-fraction-static", str(memory)]),
        *speculation_flags(policy, setting),
        *setting.options,
    ]  # fmt: skip


def speculation_flags(policy: str, setting: EngineSetting) -> list[str]:
    """Returns the flags that distinguish the command lines; STATIC and PINNED have the same."""
    if policy == OFF:
        return []
    return eagle3_flags(setting.models.eagle3, setting.shape.static_gamma)


def environment(policy: str, setting: EngineSetting, address: str) -> dict[str, str]:
    """Makes the variables of the plugin; address: the sidecar's."""
    shape = setting.shape
    if policy in (OFF, STATIC):
        return {}
    common = {"SPECULATION_SIDECAR": address, "SPECULATION_ENGINE_ID": policy}
    if policy == PINNED:
        return common | {"SPECULATION_GAMMAS": f"0,{shape.static_gamma}"}
    return common | {
        "SPECULATION_GAMMAS": ",".join(map(str, shape.gammas)),
        "SPECULATION_GRAPH_LIMITS": shape.graph_limits,
        "SPECULATION_DFLASH_MODEL_PATH": str(setting.models.dflash),
    }


def launch(
    policy: str, setting: EngineSetting, place: Workplace, acceptance: Mapping[str, str]
) -> Engine:
    """Starts an engine; acceptance: the variables that have it accept drafts."""
    variables = environment(policy, setting, place.address) | dict(acceptance)
    return launch_engine(
        policy, lambda port: command(policy, setting, port), variables, place, popen
    )


def graphs_expected(options: Sequence[str], *, on_cpu: bool) -> bool:
    """Whether every step should replay a graph; on a CPU, one of the emulated ones."""
    if on_cpu:
        return os.environ.get("CPU_ENGINE_GRAPHS") == "1"
    return "--disable-cuda-graph" not in options
