"""Starts the engines of the day in real time: they differ in their speculation flags alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.cpu_engine.engine_command import server_command
from lab.cpu_engine.forking import popen
from lab.demo.gpu import engine_watch
from lab.demo.gpu.plan import DaySetting
from lab.gpu_check.engines import cuda_options
from lab.gpu_check.shapes import Device, ModelFolders
from lab.harness.engine_environment import register_plugins
from lab.harness.engines import Engine, Workplace, launch_engine
from lab.paced.engines import (
    CONTEXT,
    PREFILL_CHUNK_TOKENS,
    fresh_log,
    speculation_flags,
    steering,
)

# Loading, and capturing every draft length's graphs.
READY_SECONDS = 400.0


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Holds what all engines share.

    curves: of the drawn acceptance, class -> drafter -> conditional acceptance.  options: further
    ones for SGLang.
    """

    day: DaySetting
    models: ModelFolders
    curves: engine_watch.Curves
    device: Device
    options: tuple[str, ...] = ()


def command(policy: str, setting: EngineSetting, port: int) -> list[str]:
    """Makes the command line of an engine."""
    day = setting.day
    flags = [
        "--load-format", "dummy",
        "--skip-tokenizer-init",
        "--chunked-prefill-size", str(PREFILL_CHUNK_TOKENS),
        "--cuda-graph-bs-decode", *map(str, day.graph_sizes),
        "--sleep-on-idle",
        *cuda_options(setting.device),
        *speculation_flags(policy, setting.models.eagle3),
        *setting.options,
    ]  # fmt: skip
    return server_command(
        setting.device.server_module, setting.models.target, port, day.max_batch_size, flags,
        max_tokens=day.kv_tokens, context=CONTEXT,
    )  # fmt: skip


def environment(policy: str, setting: EngineSetting, place: Workplace) -> dict[str, str]:
    """Makes the variables of an engine; only the steered one gets the sidecar's address."""
    return {
        **register_plugins(Path(place.scratch, "plugins"), engine_watch),
        **engine_watch.settings(fresh_log(policy, place), setting.curves),
        **steering(policy, setting.day.gammas, place),
    }


def launch(policy: str, setting: EngineSetting, place: Workplace) -> Engine:
    """Starts an engine and does not wait for it."""

    def make(port: int) -> Sequence[str]:
        return command(policy, setting, port)

    return launch_engine(policy, make, environment(policy, setting, place), place, popen)
