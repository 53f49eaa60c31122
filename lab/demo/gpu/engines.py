"""Starts the engines of the day in real time: they differ in their speculation flags alone."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.cpu_engine.forking import popen
from lab.demo.gpu import engine_watch
from lab.demo.gpu.plan import DaySetting
from lab.gpu_check.engines import cuda_options
from lab.gpu_check.shapes import Device, ModelFolders
from lab.harness.engine_environment import register_plugins
from lab.harness.engines import Engine, Workplace, launch_engine
from lab.paced.engines import (
    PREFILL_CHUNK_TOKENS,
    is_steered,
    log_path,
    speculation_flags,
)

# Loading, and capturing every draft length's graphs.
READY_SECONDS = 400.0
# More than prompt and answer of the longest request.
_CONTEXT = 2048


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
    return [
        sys.executable, "-m", setting.device.server_module,
        "--model-path", str(setting.models.target),
        "--load-format", "dummy",
        "--skip-tokenizer-init",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--max-running-requests", str(day.max_batch_size),
        "--max-total-tokens", str(day.kv_tokens),
        "--context-length", str(_CONTEXT),
        "--chunked-prefill-size", str(PREFILL_CHUNK_TOKENS),
        "--cuda-graph-bs-decode", *map(str, day.graph_sizes),
        "--random-seed", "1",
        "--log-level-http", "warning",
        "--sleep-on-idle",
        *cuda_options(setting.device),
        *speculation_flags(policy, setting.models.eagle3),
        *setting.options,
    ]  # fmt: skip


def environment(policy: str, setting: EngineSetting, place: Workplace) -> dict[str, str]:
    """Makes the variables of an engine; only the steered one gets the sidecar's address."""
    log = log_path(policy, place)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    variables = {
        **register_plugins(Path(place.scratch, "plugins"), engine_watch),
        **engine_watch.settings(log, setting.curves),
    }
    if is_steered(policy):
        variables |= {
            "SPECULATION_SIDECAR": place.address,
            "SPECULATION_ENGINE_ID": policy,
            "SPECULATION_GAMMAS": ",".join(map(str, setting.day.gammas)),
        }
    return variables


def launch(policy: str, setting: EngineSetting, place: Workplace) -> Engine:
    """Starts an engine and does not wait for it."""

    def make(port: int) -> Sequence[str]:
        return command(policy, setting, port)

    variables: Mapping[str, str] = environment(policy, setting, place)
    return launch_engine(policy, make, variables, place, popen)
