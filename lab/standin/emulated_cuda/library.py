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


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the RMS norm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _norm(name: str, shift: float) -> Callable[..., None]:
    """Makes a norm.  shift: is added to the weight, of which Gemma's checkpoints lack 1."""

    def run(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        _check_type(name, input)
        output.copy_(normed(input, weight.float() + shift, eps))

    return run


def _add_norm(name: str, shift: float) -> Callable[..., None]:
    """Makes a norm of the input with the residual, to both of which it writes."""

    def run(input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        _check_type(name, input)
        total = input.float() + residual.float()
        residual.copy_(total)
        input.copy_(normed(total, weight.float() + shift, eps))

    return run


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
_NORMS: Final = {"rmsnorm": 0.0, "gemma_rmsnorm": 1.0}
_ADD_NORMS: Final = {"fused_add_rmsnorm": 0.0, "gemma_fused_add_rmsnorm": 1.0}
_OPERATORS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    **{name: (_norm(name, shift), _NORM) for name, shift in _NORMS.items()},
    **{name: (_add_norm(name, shift), _ADD_NORM) for name, shift in _ADD_NORMS.items()},
    **{name: (function, _ACTIVATION) for name, function in _ACTIVATIONS.items()},
}


def _call_norm(
    name: str, input: Tensor, weight: Tensor, eps: float = 1e-6,
    out: Tensor | None = None, enable_pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(input) if out is None else out
    getattr(torch.ops.sgl_kernel, name).default(out, input, weight, eps, bool(enable_pdl))
    return out


def _call_add_norm(
    name: str, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    getattr(torch.ops.sgl_kernel, name).default(input, residual, weight, eps, bool(enable_pdl))


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
    elementwise = ModuleType(f"{package.__name__}.elementwise")
    calls = ((_call_norm, _NORMS), (_call_add_norm, _ADD_NORMS), (_activate, _ACTIVATIONS))
    functions = {name: partial(call, name) for call, names in calls for name in names}
    vars(elementwise).update(functions)
    utils: Any = ModuleType(f"{package.__name__}.utils")
    utils.is_arch_support_pdl = lambda: True
    for name, module in (("elementwise", elementwise), ("utils", utils)):
        sys.modules[module.__name__] = module
        setattr(package, name, module)
    # What SGLang imports from these fails when it is called.
    for name in _OTHER_MODULES:
        sys.modules[f"{package.__name__}.{name}"] = package
    vars(package).update(functions)
