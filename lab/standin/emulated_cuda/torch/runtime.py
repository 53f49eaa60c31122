"""Takes the place of `torch.cuda`: one device, an H100 that says that it is emulated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from cpu_graphs import graph

from emulated_cuda.torch import places, streams, waits

# CUDA version of the images of SGLang 0.5.23.
_CUDA_VERSION: Final = "13.0"
NAME: Final = "NVIDIA H100 80GB HBM3 (emulated on a CPU)"
_CAPABILITY: Final = (9, 0)


def _properties(device: object = None) -> SimpleNamespace:
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=places.total_bytes(),
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _mem_get_info(device: object = None) -> tuple[int, int]:
    total = places.total_bytes()
    return total - places.CONTEXT_BYTES - places.ledger.allocated, total


def _memory_stats(device: object = None) -> dict[str, int]:
    ledger = places.ledger
    return {
        f"{kind}_bytes.all.{statistic}": value
        for kind in ("allocated", "reserved", "active")
        for statistic, value in (("current", ledger.allocated), ("peak", ledger.peak))
    }


def _reset_peak(device: object = None) -> None:
    places.ledger.peak = places.ledger.allocated


def _no_op(*_: object, **__: object) -> None:
    pass


def _allocated(device: object = None) -> int:
    return places.ledger.allocated


def _peak(device: object = None) -> int:
    return places.ledger.peak


# Registering host memory with the driver has no effect: all memory is the host's.
_RUNTIME_LIBRARY: Final = SimpleNamespace(
    cudaHostRegister=lambda *_: 0,
    cudaHostUnregister=lambda *_: 0,
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
)

_REPLACED: Final[dict[str, Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": _no_op,
    "init": _no_op,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _no_op,
    "get_device_capability": lambda device=None: _CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": _properties,
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True,
    "can_device_access_peer": lambda *_: False,
    "_get_nvml_device_index": lambda device=None: 0,
    "mem_get_info": _mem_get_info,
    "memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "memory_stats": _memory_stats,
    "memory_snapshot": list,
    "reset_peak_memory_stats": _reset_peak,
    "empty_cache": _no_op,
    "ipc_collect": _no_op,
    "synchronize": _no_op,
    "manual_seed": _no_op,
    "manual_seed_all": _no_op,
    "check_error": _no_op,
    "cudart": lambda: _RUNTIME_LIBRARY,
    "set_sync_debug_mode": waits.set_mode,
    "get_sync_debug_mode": waits.get_mode,
    "Event": streams.Event,
    "Stream": streams.Stream,
    "StreamContext": streams.StreamContext,
    "stream": streams.use_stream,
    "device": streams.DeviceContext,
    "current_stream": streams.current_stream,
    "default_stream": lambda device=None: streams.default_stream,
    "set_stream": streams.set_stream,
    "CUDAGraph": streams.Graph,
    "graph": streams.Capture,
    "graph_pool_handle": lambda: (0, 0),
    "is_current_stream_capturing": graph.is_capturing,
}


class _Generator(torch._C.Generator):
    """Takes the place of `torch.Generator`: all random numbers are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Self:
        cpu_device = "cpu" if torch.device(device).type == "cuda" else device
        return super().__new__(cls, device=cpu_device)  # type: ignore[call-arg]


def _copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of its own, as torch's compiler wants of each name."""

    def copied(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return copied


def install() -> None:
    """Replaces what programs use of `torch.cuda`, in this process."""
    for name, value in _REPLACED.items():
        setattr(torch.cuda, name, value if isinstance(value, type) else _copy_function(value))
    torch.version.cuda = _CUDA_VERSION
    vars(torch)["Generator"] = _Generator
    find_module = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        return torch.cuda if device is None else find_module(device)

    vars(torch)["get_device_module"] = get_device_module
