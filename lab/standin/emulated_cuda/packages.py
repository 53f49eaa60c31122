"""Stands in for packages that SGLang imports on CUDA and that are not installed.

Of nvidia-cutlass-dsl and sgl-flash-mla, SGLang uses on Hopper, for dense models, only the imports.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any, Final

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


def install() -> None:
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
