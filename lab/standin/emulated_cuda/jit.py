"""The kernels that SGLang compiles itself while it runs, in torch.

Each function has the name that a module of SGLang's exports, and takes what that takes.  A graph
records a call of one as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F
from cpu_graphs import recorder
from sgl_kernel.sampling import tree_speculative_sampling_target_only
from sgl_kernel.speculative import (
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)
from torch import Tensor

from emulated_cuda.library import normed

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class MissingKernelError(NotImplementedError):
    """A kernel was launched that this emulation does not compute."""


def store_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    size_limit: int,
    reserved_skip_index: int,
) -> None:
    """Writes rows to the slots of a cache, but for the slot that padding writes to."""
    outside = (indices < 0) | (indices >= size_limit)
    if bool(outside.any()):
        raise IndexError(f"a slot of the cache is not below {size_limit}: {indices.tolist()}")
    is_stored = indices != reserved_skip_index
    slots = indices[is_stored].long()
    k_cache[slots] = k[is_stored].reshape(len(slots), *k_cache.shape[1:])
    v_cache[slots] = v[is_stored].reshape(len(slots), *v_cache.shape[1:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool) -> None:
    """Rotates the first dimensions of each head in place; x: ``[tokens, heads, head size]``."""
    size = 2 * cos.shape[-1]
    rotated = x[..., :size]
    if is_neox:
        first, second = rotated[..., : size // 2], rotated[..., size // 2 :]
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    a, b = first.float(), second.float()
    cos, sin = cos[:, None].float(), sin[:, None].float()
    # In float32 these are the heads' own memory, so both are computed before one is written.
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotates queries and keys ``[tokens, heads * head_size]`` in place."""
    cos, sin = cos_sin_cache[positions.long().view(-1)].chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            _rotate(tensor.view(len(cos), -1, head_size), cos, sin, is_neox=is_neox)


def _run_rope(is_neox: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    def run_rope(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin_cache[positions.long()].chunk(2, dim=-1)
        for tensor in (q, k):
            _rotate(tensor, cos, sin, is_neox=is_neox)

    return run_rope


def _run_rope_store(is_neox: bool) -> Callable[..., None]:
    rotate = _run_rope(is_neox)

    def run_rope_store(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
        cos_sin_cache: Tensor, positions: Tensor, out_loc: Tensor,
    ) -> None:  # fmt: skip
        rotate(q, k, cos_sin_cache, positions)
        slots = out_loc.long()
        k_cache[slots] = k.reshape(len(slots), *k_cache.shape[1:])
        v_cache[slots] = v.reshape(len(slots), *v_cache.shape[1:])

    return run_rope_store


def qknorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Normalises each head of queries and keys in place."""
    q.copy_(normed(q, q_weight, eps))
    k.copy_(normed(k, k_weight, eps))


def rmsnorm(input: Tensor, weight: Tensor, output: Tensor, eps: float) -> None:
    """Writes the norm of the rows to output."""
    output.copy_(normed(input, weight, eps))


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Sets ``residual += input`` and ``input = norm(residual)`` in place."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(normed(total, weight, eps))


def run_activation(input: Tensor, output: Tensor, name: str) -> None:
    """Computes ``activation(input[:, :d]) * input[:, d:]``."""
    gate, up = input.float().chunk(2, dim=-1)
    output.copy_(_ACTIVATIONS[name](gate) * up)


def clamp_position(output: Tensor, lengths: Tensor) -> None:
    """Computes the positions of the last tokens."""
    output.copy_((lengths - 1).clamp(min=0))


_KERNELS: Final[dict[str, Callable[..., None]]] = {
    "build_tree_kernel_efficient": build_tree_kernel_efficient_cpu,
    "clamp_position": clamp_position,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "qknorm": qknorm,
    "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
    "rmsnorm": rmsnorm,
    "rotary_embedding": rotary_embedding,
    "run_activation": run_activation,
    "sample": tree_speculative_sampling_target_only,
    "store_cache": store_cache,
    "verify_tree_greedy": verify_tree_greedy_cpu,
}
# Those that are compiled for one way of rotating, by their first template argument.
_ROTATING: Final = {"run_rope": _run_rope, "run_rope_store": _run_rope_store}


def make_module(marker: Iterable[str], exports: Iterable[tuple[str, str]]) -> SimpleNamespace:
    """Makes what SGLang's compiler makes.

    marker: the module's name and its template arguments.  exports: pairs of the name that Python
    calls and of the name in C++.
    """
    words = list(marker)
    return SimpleNamespace(**{name: _launcher(name, words) for name, _ in exports})


def _launcher(name: str, words: list[str]) -> Callable[..., None]:
    if name in _ROTATING:
        kernel = _ROTATING[name]("true" in words[1].split(",")[0].lower())
    else:
        kernel = _KERNELS.get(name) or _missing(name, words)
    kernel.__name__ = name

    def launch(*arguments: Any) -> None:
        with torch._C.DisableTorchFunction():
            recorder.run_kernel(kernel, arguments, {})

    return launch


def _missing(name: str, words: list[str]) -> Callable[..., None]:
    def kernel(*_: object) -> None:
        raise MissingKernelError(
            f"the emulated device has no kernel {name!r} of SGLang's module {words}: compute it in "
            f"torch in {__name__}"
        )

    return kernel
