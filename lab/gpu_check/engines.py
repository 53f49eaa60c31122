"""The check's engines: SGLang servers of one shape that differ in speculation alone.

OFF           no speculation configured
STATIC        EAGLE3 with one draft length, without the plugin
PINNED        the same drafter with the plugin, held to that draft length
ADAPTIVE      SGLang's own adaptive mode
STEERED       both drafters, every draft length
*_NO_OVERLAP  without the overlap schedule
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.cpu_engine.engine_command import adaptive_flags, eagle3_flags, server_command
from lab.cpu_engine.forking import popen
from lab.gpu_check.shapes import Device, ModelFolders, Shape
from lab.gpu_check.small_engines import count_chain_captures
from lab.harness.engine_environment import steered_by
from lab.harness.engines import Engine, Workplace, launch_engine

OFF, STATIC, PINNED, ADAPTIVE, STEERED = "off", "static", "pinned", "sglang-adaptive", "steered"
STATIC_NO_OVERLAP, PINNED_NO_OVERLAP = "static-no-overlap", "pinned-no-overlap"
SHAPE_ENGINES = (
    OFF, STATIC, PINNED, ADAPTIVE, STEERED, STATIC_NO_OVERLAP, PINNED_NO_OVERLAP,
)  # fmt: skip
# Draft lengths that SGLang's adaptive mode prepares by default.
_ADAPTIVE_GAMMAS = (1, 3, 7)
# Shares of the GPU's free memory: of a single engine, of the steered one if another engine has to
# fit beside it, and of that other one.  The KV pools are equal, see --max-total-tokens.
_MEMORY_SHARE_ALONE, _MEMORY_SHARE_STEERED, _MEMORY_SHARE_OTHER = 0.85, 0.45, 0.75

_EMULATED_OPTIONS = ("--attention-backend", "triton", "--sampling-backend", "pytorch")


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The shape and the place of all engines.

    graph_sizes: batch sizes with CUDA graphs, ascending.  in_pairs: whether two engines are alive
    at a time in any part, so that all have the smaller pool.  options: further options for SGLang.
    """

    shape: Shape
    models: ModelFolders
    device: Device
    graph_sizes: tuple[int, ...]
    in_pairs: bool
    options: tuple[str, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens of each engine's KV pool."""
        return self.shape.pair_pool_tokens if self.in_pairs else self.shape.pool_tokens


def command(engine_name: str, setting: EngineSetting, port: int) -> list[str]:
    """Makes the command line of an engine."""
    shape, device = setting.shape, setting.device
    flags = [
        "--load-format", "dummy",
        "--skip-tokenizer-init",
        # The engine that waits must leave the machine alone.
        "--sleep-on-idle",
        *(_memory_options(engine_name, setting) if device.takes_cuda_options else ()),
        *cuda_options(device),
        *speculation_flags(engine_name, setting),
        *(["--disable-overlap-schedule"] if engine_name.endswith("-no-overlap") else []),
        *setting.options,
    ]  # fmt: skip
    return server_command(
        device.server_module, setting.models.target, port, shape.max_batch, flags,
        max_tokens=setting.pool_tokens, context=shape.context_length,
    )  # fmt: skip


def cuda_options(device: Device) -> list[str]:
    """Returns the options of every engine with a shape, on a GPU or an emulated one."""
    if not device.takes_cuda_options:
        return []
    # Graphs of prompts would multiply the captures; prompts are not what is measured.
    prefill = ["--cuda-graph-backend-prefill", "disabled"]
    # FlashAttention and FlashInfer have no emulation.
    return [*prefill, *(_EMULATED_OPTIONS if device is Device.EMULATED else ())]


def _memory_options(engine_name: str, setting: EngineSetting) -> list[str]:
    memory = _MEMORY_SHARE_ALONE
    if setting.in_pairs:
        memory = _MEMORY_SHARE_STEERED if engine_name == STEERED else _MEMORY_SHARE_OTHER
    return [
        "--mem-fraction-static", str(memory),
        "--cuda-graph-bs-decode", *map(str, setting.graph_sizes),
    ]  # fmt: skip


def speculation_flags(engine_name: str, setting: EngineSetting) -> list[str]:
    """Returns the flags that distinguish the command lines; STATIC and PINNED have the same."""
    if engine_name == OFF:
        return []
    if engine_name == ADAPTIVE:
        return adaptive_flags("EAGLE3", setting.models.eagle3)
    return eagle3_flags(setting.models.eagle3, setting.shape.static_gamma)


def environment(engine_name: str, setting: EngineSetting, address: str) -> dict[str, str]:
    """Makes the variables of the plugin; address: the sidecar's."""
    shape = setting.shape
    if engine_name not in (PINNED, PINNED_NO_OVERLAP, STEERED):
        return {}
    if engine_name != STEERED:
        return steered_by(address, engine_name, (0, shape.static_gamma))
    return steered_by(address, engine_name, shape.gammas) | {
        "SPECULATION_GRAPH_LIMITS": shape.graph_limits,
        "SPECULATION_DFLASH_MODEL_PATH": str(setting.models.dflash),
    }


def launch(
    engine_name: str, setting: EngineSetting, place: Workplace, variables: Mapping[str, str]
) -> Engine:
    """Starts an engine.  variables: further ones, of the check's own plugins."""
    plugin_variables = environment(engine_name, setting, place.address)
    return launch_engine(
        engine_name,
        lambda port: command(engine_name, setting, port),
        plugin_variables | dict(variables),
        place,
        popen,
    )


def count_captures(engine_name: str, shape: Shape, sizes: Sequence[int]) -> int:
    """Counts the CUDA graphs of an engine whose graphs have these batch sizes."""
    if engine_name == OFF:
        return len(sizes)
    if engine_name == ADAPTIVE:
        return count_chain_captures(_ADAPTIVE_GAMMAS, len(sizes))
    if engine_name in (STATIC, STATIC_NO_OVERLAP):
        return count_chain_captures((shape.static_gamma,), len(sizes))
    if engine_name != STEERED:
        return count_chain_captures((0, shape.static_gamma), len(sizes))
    limits = shape.limits()
    chain_graphs = sum(
        count_chain_captures((gamma,), sum(size <= limits.get(gamma, size) for size in sizes))
        for gamma in shape.gammas
    )
    return chain_graphs + len(sizes)  # DFlash's block


def graphs_expected(options: Sequence[str], device: Device) -> bool:
    """Whether every step should replay a graph; on a CPU, one of the emulated ones."""
    if device is Device.CPU:
        return os.environ.get("CPU_ENGINE_GRAPHS") == "1"
    return "--disable-cuda-graph" not in options
