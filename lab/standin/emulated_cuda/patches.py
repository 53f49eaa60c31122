"""Puts the emulated device in place in torch, when it is imported, and in SGLang's processes.

It also stands in for packages that SGLang imports on CUDA and that are not installed: of
nvidia-cutlass-dsl and sgl-flash-mla, SGLang uses on Hopper, for dense models, only the imports.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

_DUAL_GEMM: Final = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"


class _DualGemmQuantMode(IntEnum):
    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


class _Missing(ModuleType):
    """A module whose functions can be imported, and fail when they are called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not part of the emulation")

        return missing


def _install_packages() -> None:
    """Lets SGLang import them in this process."""
    # SGLang's own module for Blackwell, which needs nvidia-cutlass-dsl to be imported.
    dual_gemm: Any = ModuleType(_DUAL_GEMM)
    dual_gemm.MAX_DUAL_GEMM_DECODE_TOKENS = 16
    dual_gemm.DualGemmQuantMode = _DualGemmQuantMode
    dual_gemm.can_use_dual_gemm = lambda *_, **__: False
    sys.modules[_DUAL_GEMM] = dual_gemm
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        sys.modules[name] = _Missing(name)
    interface: Any = sys.modules["flash_mla.flash_mla_interface"]
    interface.FlashMLASchedMeta = type("FlashMLASchedMeta", (), {})


_SCHEDULER = "sglang.srt.managers.scheduler"


def install_in_torch() -> None:
    """Called by torch at the end of its import."""
    from emulated_cuda.torch import functions, runtime

    runtime.install()
    functions.install()
    _install_packages()
    _replace_nccl()


def install_in_sglang() -> None:
    """Called by SGLang in each of its processes, before it runs anything on the device."""
    if _SCHEDULER not in sys.modules:
        return
    from cpu_graphs.patches import record_triton
    from sglang.kernels.jit.utils.compile import loader
    from sglang.kernels.ops.attention import decode_attention, extend_attention
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.utils import custom_op

    from emulated_cuda import attention, triton_kernels

    _compile_in_torch(loader)
    # A GPU's engine has none of the modes that the emulation is made of.
    custom_op._function_modes = custom_op._dispatch_modes = lambda: 0
    # It collects garbage around each capture, which frees memory of a GPU and takes most of the
    # time here.
    decode_cuda_graph_runner.freeze_gc = lambda _: nullcontext()
    record_triton()
    triton_kernels.install()
    attention.install(decode_attention, extend_attention)


def _compile_in_torch(loader: ModuleType) -> None:
    """Has every module that SGLang would compile be found, and made, in `emulated_cuda.jit`."""
    from emulated_cuda import jit

    changed: Any = loader
    changed._find_prebuilt = lambda *, spec, scope: SimpleNamespace(spec=spec)
    changed._load = lambda kernel: jit.make_module(
        kernel.spec.module_args, (*kernel.spec.cpp_wrappers, *kernel.spec.cuda_wrappers)
    )


def _replace_nccl() -> None:
    """Has groups of processes that ask for NCCL, which needs GPUs, use gloo."""
    from torch.distributed import distributed_c10d as groups

    for name in ("init_process_group", "new_group"):
        original = getattr(groups, name)

        def make(*arguments: Any, original: Any = original, **keywords: Any) -> Any:
            if "nccl" in str(keywords.get("backend")):
                keywords["backend"] = "gloo"
            keywords.pop("device_id", None)
            keywords.pop("pg_options", None)
            return original(*arguments, **keywords)

        setattr(groups, name, make)
        setattr(torch.distributed, name, make)
