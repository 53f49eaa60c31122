"""Puts the emulated device in place in torch, when it is imported, and in SGLang's processes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_SCHEDULER = "sglang.srt.managers.scheduler"


def install_in_torch() -> None:
    """Called by torch at the end of its import."""
    from emulated_cuda import packages
    from emulated_cuda.torch import functions, runtime

    runtime.install()
    functions.install()
    packages.install()
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
    changed._load = lambda found: jit.make_module(
        found.spec.module_args, (*found.spec.cpp_wrappers, *found.spec.cuda_wrappers)
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
