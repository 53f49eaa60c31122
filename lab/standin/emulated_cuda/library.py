"""The operators of sgl_kernel's compiled library that dense models reach on CUDA, in torch.

They are registered with torch, as the library registers them, and so graphs record them.  As in the
library, norms take half and bfloat16 only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVES: Final = (torch.float16, torch.bfloat16)
_NORM: Final = "(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()"
_ADD_NORM: Final = (
    "(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()"
)
_ACTIVATION: Final = "(Tensor! out, Tensor input) -> ()"
_OTHER_MODULES: Final = ("allreduce", "flash_attn", "quantization")
# Registrations last as long as this object.
_LIBRARY: Final = torch.library.Library("sgl_kernel", "FRAGMENT")


def _check_type(name: str, tensor: Tensor) -> None:
    """Raises RuntimeError as the library does, whose kernels are compiled for two types."""
    if tensor.dtype not in _HALVES:
        kind = "Float" if tensor.dtype == torch.float32 else str(tensor.dtype)
        raise RuntimeError(f"{name} failed to dispatch data type {kind}")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _rmsnorm(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    _check_type("rmsnorm", input)
    output.copy_(_normed(input, weight, eps))


def _gemma_rmsnorm(
    output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool
) -> None:
    _check_type("gemma_rmsnorm", input)
    output.copy_(_normed(input, weight.float() + 1, eps))


def _fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool
) -> None:
    _check_type("fused_add_rmsnorm", input)
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def _gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool
) -> None:
    _fused_add_rmsnorm(input, residual, weight.float() + 1, eps, enable_pdl)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def run(out: Tensor, input: Tensor) -> None:
        gate, up = input.float().chunk(2, dim=-1)
        out.copy_(activation(gate) * up)

    return run


_ACTIVATIONS: Final = {
    "silu_and_mul": _gated(F.silu),
    "gelu_and_mul": _gated(F.gelu),
    "gelu_tanh_and_mul": _gated(partial(F.gelu, approximate="tanh")),
}
_OPERATORS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "rmsnorm": (_rmsnorm, _NORM),
    "gemma_rmsnorm": (_gemma_rmsnorm, _NORM),
    "fused_add_rmsnorm": (_fused_add_rmsnorm, _ADD_NORM),
    "gemma_fused_add_rmsnorm": (_gemma_fused_add_rmsnorm, _ADD_NORM),
    **{name: (function, _ACTIVATION) for name, function in _ACTIVATIONS.items()},
}


def _rmsnorm_internal(
    input: Tensor, weight: Tensor, eps: float, out: Tensor | None, enable_pdl: bool | None
) -> Tensor:
    out = torch.empty_like(input) if out is None else out
    torch.ops.sgl_kernel.rmsnorm.default(out, input, weight, eps, bool(enable_pdl))
    return out


def _gemma_rmsnorm_internal(
    input: Tensor, weight: Tensor, eps: float, out: Tensor | None, enable_pdl: bool | None
) -> Tensor:
    out = torch.empty_like(input) if out is None else out
    torch.ops.sgl_kernel.gemma_rmsnorm.default(out, input, weight, eps, bool(enable_pdl))
    return out


def _fused_add_rmsnorm_internal(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool | None
) -> None:
    torch.ops.sgl_kernel.fused_add_rmsnorm.default(input, residual, weight, eps, bool(enable_pdl))


def _gemma_fused_add_rmsnorm_internal(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool | None
) -> None:
    operator = torch.ops.sgl_kernel.gemma_fused_add_rmsnorm.default
    operator(input, residual, weight, eps, bool(enable_pdl))


def _make_elementwise(name: str) -> ModuleType:
    """Makes sgl_kernel's module of that name, through whose inner functions its outer ones go."""
    module: Any = ModuleType(name)
    for inner in (
        _rmsnorm_internal, _gemma_rmsnorm_internal,
        _fused_add_rmsnorm_internal, _gemma_fused_add_rmsnorm_internal,
    ):  # fmt: skip
        setattr(module, inner.__name__, inner)

    def rmsnorm(
        input: Tensor, weight: Tensor, eps: float = 1e-6,
        out: Tensor | None = None, enable_pdl: bool | None = None,
    ) -> Tensor:  # fmt: skip
        found: Tensor = module._rmsnorm_internal(input, weight, eps, out, enable_pdl)
        return found

    def gemma_rmsnorm(
        input: Tensor, weight: Tensor, eps: float = 1e-6,
        out: Tensor | None = None, enable_pdl: bool | None = None,
    ) -> Tensor:  # fmt: skip
        found: Tensor = module._gemma_rmsnorm_internal(input, weight, eps, out, enable_pdl)
        return found

    def fused_add_rmsnorm(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6,
        enable_pdl: bool | None = None,
    ) -> None:  # fmt: skip
        module._fused_add_rmsnorm_internal(input, residual, weight, eps, enable_pdl)

    def gemma_fused_add_rmsnorm(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6,
        enable_pdl: bool | None = None,
    ) -> None:  # fmt: skip
        module._gemma_fused_add_rmsnorm_internal(input, residual, weight, eps, enable_pdl)

    for outer in (rmsnorm, gemma_rmsnorm, fused_add_rmsnorm, gemma_fused_add_rmsnorm):
        setattr(module, outer.__name__, outer)
    for activation in _ACTIVATIONS:
        setattr(module, activation, partial(_activate, activation))
    return module


def _activate(name: str, input: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
    getattr(torch.ops.sgl_kernel, name).default(out, input)
    return out


def install(package: ModuleType) -> None:
    """Gives the stand-in `sgl_kernel` what its CUDA build has."""
    for name, (function, schema) in _OPERATORS.items():
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CPU")
    elementwise = _make_elementwise(f"{package.__name__}.elementwise")
    utils: Any = ModuleType(f"{package.__name__}.utils")
    utils.is_arch_support_pdl = lambda: True
    for name, module in (("elementwise", elementwise), ("utils", utils)):
        sys.modules[module.__name__] = module
        setattr(package, name, module)
    # What SGLang imports from these fails when it is called.
    for name in _OTHER_MODULES:
        sys.modules[f"{package.__name__}.{name}"] = package
    public = {name: value for name, value in vars(elementwise).items() if name[0] != "_"}
    vars(package).update(public)
