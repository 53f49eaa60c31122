"""SGLang's Triton attention kernels in torch, because Triton's interpreter takes minutes for them.

An interpreted launch runs every program of its grid in Python: one for each sequence, head, and
split of the cache.  With EMULATED_CUDA_TRITON=interpreted the kernels themselves run.  Sliding
windows, sinks, and other variants always do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import torch
from cpu_graphs import recorder
from torch import Tensor

from emulated_cuda import triton_kernels

# What SGLang passes for a variant that is not asked for.
_DEFAULT_VARIANTS: Final[dict[str, tuple[Any, ...]]] = {
    "logit_cap": (0.0, 0),
    "sinks": (None,),
    "xai_temperature_len": (-1,),
    "score_mod": (None,),
    "sliding_window_size": (-1,),
    "window_kv_offsets": (None,),
    "lse_extend": (None,),
    "skip_prefix": (False,),
    "skip_extend": (False,),
    "page_size": (1,),
    "has_mla": (False,),
    "skip_prefix_custom_mask": (True,),
    "identity_kv_indices": (False,),
}


def install(decode: ModuleType, extend: ModuleType) -> None:
    """Replaces the kernels' functions in SGLang's modules."""
    if triton_kernels.is_interpreted():
        return
    for module, name, kernel in (
        (decode, "decode_attention_fwd", decode_attention),
        (extend, "extend_attention_fwd", extend_attention),
    ):
        setattr(module, name, _replacement(kernel, getattr(module, name)))


def _replacement(kernel: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*arguments: Any, **keywords: Any) -> Any:
        if any(
            keywords.get(name, usual[0]) not in usual for name, usual in _DEFAULT_VARIANTS.items()
        ):
            return original(*arguments, **keywords)
        with torch._C.DisableTorchFunction():
            return recorder.run_kernel(kernel, arguments, keywords)

    return attend


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    **_: Any,
) -> None:
    """Attends with one query ``[heads, head size]`` for each sequence, to its slots of the cache.

    Sequence i has the slots ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``.  Writes to ``o``.
    """
    ends = kv_indptr[: len(q) + 1].tolist()
    for row, (start, end) in enumerate(pairwise(ends)):
        slots = kv_indices[start:end]
        keys, values = k_buffer[slots], v_buffer[slots]
        attended = _attend(q[row : row + 1], keys, values, sm_scale * k_scale, None)
        o[row : row + 1] = attended.mul_(v_scale).view_as(o[row : row + 1])


def extend_attention(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    **_: Any,
) -> None:
    """Attends with the new tokens of each sequence to its slots of the cache and to one another.

    custom_mask: for each sequence ``[new tokens, cached and new tokens]``, flat, of which the part
    of the new tokens counts.  Writes to ``o_extend``.
    """
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    queries, slots = qo_indptr.tolist(), kv_indptr.tolist()
    masks = None if mask_indptr is None else mask_indptr.tolist()
    for row in range(len(queries) - 1):
        first, last = queries[row], queries[row + 1]
        cached = kv_indices[slots[row] : slots[row + 1]]
        new, prefix = last - first, len(cached)
        if not new:
            continue
        keys = torch.cat((k_buffer[cached] * k_scale, k_extend[first:last]))
        values = torch.cat((v_buffer[cached] * v_scale, v_extend[first:last]))
        visible = torch.ones((new, prefix + new), dtype=torch.bool)
        if custom_mask is not None and masks is not None:
            tree_mask = custom_mask[masks[row] : masks[row] + new * (prefix + new)]
            visible[:, prefix:] = tree_mask.view(new, -1)[:, prefix:].bool()
        elif is_causal:
            visible[:, prefix:].tril_()
        attended = _attend(q_extend[first:last], keys, values, scale, visible)
        o_extend[first:last] = attended.view_as(o_extend[first:last])


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None
) -> Tensor:
    """Computes ``[queries, heads * head size]`` in float32; visible: ``[queries, keys]``."""
    count, heads, size = q.shape
    shared = keys.shape[1]
    grouped = q.float().view(count, shared, heads // shared, size).permute(1, 2, 0, 3)
    scores = (grouped.reshape(shared, -1, size) @ keys.float().permute(1, 2, 0)) * scale
    if visible is not None:
        scores.masked_fill_(~visible.repeat(heads // shared, 1), -torch.inf)
    attended = scores.softmax(-1) @ values.float().permute(1, 0, 2)
    return attended.view(shared, heads // shared, count, -1).permute(2, 0, 1, 3).reshape(count, -1)
