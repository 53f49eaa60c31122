"""SGLang's Triton kernels on the emulated device: interpreted, and those in every step in torch.

An interpreted launch takes tenths of a second and up, so kernels of each step are computed by a few
operators of torch instead, from the same arguments.  With EMULATED_CUDA_TRITON=interpreted all
kernels are interpreted; the attention of `emulated_cuda.attention` then is as well.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from cpu_graphs import recorder
from sgl_kernel.kv_cache import copy_all_layer_kv_cache_cpu
from torch import Tensor

from emulated_cuda.torch import places

Arguments = dict[str, Any]
Grid = tuple[int, ...]


def is_interpreted() -> bool:
    """Whether the environment asks for the kernels themselves."""
    return os.environ.get("EMULATED_CUDA_TRITON") == "interpreted"


def install() -> None:
    """Has Triton's interpreter launch as on CUDA.

    Call it when launches are recorded already.
    """
    from triton.language.extra import cuda
    from triton.runtime import interpreter

    # A kernel waits for the one before it, and lets the next one begin; here none overlaps another.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda: None)
    # Each launch looks Triton's modules through, which takes longer than a small kernel.
    interpreter.inspect = SimpleNamespace(
        **{**vars(inspect), "getmembers": cache(inspect.getmembers)}
    )
    launch = interpreter.GridExecutor.__call__
    in_torch = {} if is_interpreted() else _IN_TORCH

    def launch_on_device(executor: Any, *arguments: Any, **keywords: Any) -> None:
        name = executor.fn.__name__
        _check_places(name, (*arguments, *keywords.values()))
        kernel = in_torch.get(name)
        with torch._C.DisableTorchFunction():
            if kernel is None or not kernel.accepts(executor, arguments, keywords):
                launch(executor, *arguments, **keywords)
            else:
                kernel.launch(executor, arguments, keywords)

    type.__setattr__(interpreter.GridExecutor, "__call__", launch_on_device)


def _check_places(name: str, values: tuple[Any, ...]) -> None:
    """Raises ValueError for a tensor of the host, as Triton does."""
    for value in values:
        if isinstance(value, Tensor) and not places.is_on_device(value):
            raise ValueError(
                "Pointer argument cannot be accessed from Triton (cpu tensor?): a tensor of shape "
                f"{list(value.shape)} for {name}"
            )


class _TorchKernel:
    """A kernel in torch.

    run: takes the grid and the named arguments.  usual: arguments that it knows one value of; with
    others the kernel is interpreted.
    """

    def __init__(self, run: Callable[[Grid, Arguments], None], **usual: Any) -> None:
        self._run, self._usual = run, usual

    def accepts(self, executor: Any, arguments: tuple[Any, ...], keywords: Arguments) -> bool:
        named = _bind_arguments(executor, arguments, keywords)
        return all(named[name] == value for name, value in self._usual.items())

    def launch(self, executor: Any, arguments: tuple[Any, ...], keywords: Arguments) -> None:
        named = _bind_arguments(executor, arguments, keywords)
        grid = executor.grid(named) if callable(executor.grid) else executor.grid

        def run_again(named: Arguments) -> None:
            self._run(grid, named)

        run_again.__name__ = executor.fn.__name__
        recorder.run_kernel(run_again, (named,), {})


def _bind_arguments(executor: Any, arguments: tuple[Any, ...], keywords: Arguments) -> Arguments:
    parameters = inspect.signature(executor.fn).parameters
    known_keywords = {name: value for name, value in keywords.items() if name in parameters}
    return inspect.getcallargs(executor.fn, *arguments, **known_keywords)


def _copy_small(grid: Grid, named: Arguments) -> None:
    for number, (source, target) in enumerate(
        zip(named["sources"], named["destinations"], strict=True)
    ):
        size, columns = named["sizes"][number], named["cols"][number]
        shape = (size // columns, columns)
        destination = target.as_strided(shape, tuple(named["dest_strides"][number]))
        destination.copy_(source.as_strided(shape, tuple(named["source_strides"][number])))


def _find_partial_argmax(grid: Grid, named: Arguments) -> None:
    rows, splits = grid[:2]
    block, size = named["BLOCK"], named["vocab_size"]
    logits = named["logits"].as_strided((rows, size), (named["logits_row_stride"], 1))
    for split in range(splits):
        part = logits[:, split * block : (split + 1) * block].float()
        best, index = torch.where(part.isnan(), -1e30, part).max(dim=1)
        named["partial_vals"].view(rows, splits)[:, split] = best
        named["partial_indices"].view(rows, splits)[:, split] = (split * block + index).int()


def _find_argmax(grid: Grid, named: Arguments) -> None:
    rows = grid[0]
    splits = named["partial_vals"].view(rows, -1).argmax(dim=1, keepdim=True)
    indices = named["partial_indices"].view(rows, -1).gather(1, splits)[:, 0].long()
    named["topk_index"].view(-1)[:rows] = indices
    named["topk_p"].view(-1)[:rows] = 1.0
    if named["WRITE_DRAFT_TOKEN"]:
        named["draft_tokens"][:rows, named["draft_token_column"]] = indices
    named["positions"][:rows] += 1


def _copy_cache_rows(grid: Grid, named: Arguments) -> None:
    count = named["num_locs"]
    copy_all_layer_kv_cache_cpu.__wrapped__(
        named["data_ptrs"], named["strides"],
        named["tgt_loc_ptr"][:count], named["src_loc_ptr"][:count],
    )  # fmt: skip


def _list_slots(grid: Grid, named: Arguments) -> None:
    table, out = named["req_to_token_ptr"], named["kv_indices_ptr"]
    rows, lengths, starts = (
        named[name][: grid[0]].tolist()
        for name in ("req_pool_indices_ptr", "page_kernel_lens_ptr", "kv_indptr")
    )
    first = named["kv_start_idx"]
    for number, (row, length, start) in enumerate(zip(rows, lengths, starts, strict=True)):
        begin = 0 if first is None else int(first[number])
        out[start : start + length] = table[row, begin : begin + length].to(out.dtype)


def _list_draft_slots(grid: Grid, named: Arguments) -> None:
    """Lists, for each further draft, the slots of its sequence and of the drafts before it.

    It knows one branch only.
    """
    steps, size = named["NUM_STEPS"] or grid[0], grid[1]
    table, out, pointers = named["req_to_token"], named["kv_indices"], named["kv_indptr"]
    rows = named["req_pool_indices"][:size].tolist()
    lengths = named["paged_kernel_lens"][:size].tolist()
    positions = named["positions"][:size].tolist()
    for step in range(steps):
        slots = out.view(-1)[named["kv_indices_stride"] * step :]
        ends = pointers.view(-1)[named["kv_indptr_stride"] * step :]
        offset = 0
        for row, length in zip(rows, lengths, strict=True):
            count = length + step + 1
            slots[offset : offset + count] = table[row, :count].to(out.dtype)
            offset += count
        for number in range(1, size + 1):
            ends[number] = sum(positions[:number]) + number * (step + 1)


def _norm_and_rotate_keys(grid: Grid, named: Arguments) -> None:
    """Makes keys and values of all layers from their projections, for DFlash's cache."""
    tokens, heads, layers = grid
    size, dim = named["kv_size"], named["head_dim"]
    projected = named["kv_ptr"].as_strided(
        (2, layers, tokens, heads, dim),
        (size, named["kv_stride_layer"], named["kv_stride_ctx"], dim, 1),
    )
    keys, values = projected
    weight = named["k_norm_weight_ptr"].as_strided(
        (layers, 1, 1, dim), (named["k_norm_weight_stride_layer"], 0, 0, 1)
    )
    eps = named["eps_ptr"][:layers].float().view(layers, 1, 1, 1)
    wide = keys.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    half, rotary = named["half_rotary_dim"], named["rotary_dim"]
    angles = named["cos_sin_cache_ptr"][named["positions_ptr"][:tokens]].float()
    cos, sin = angles[:, None, :half], angles[:, None, half:rotary]
    first, second = wide[..., :half], wide[..., half:rotary]
    rotated = [first * cos - second * sin, second * cos + first * sin, wide[..., rotary:]]
    for name, rows in (("k", torch.cat(rotated, dim=-1)), ("v", values)):
        strides = [named[f"{name}_out_stride_{axis}"] for axis in ("layer", "ctx", "head")]
        out = named[f"{name}_out_ptr"].as_strided((layers, tokens, heads, dim), (*strides, 1))
        out.copy_(rows)


def _norm_and_rotate_in_place(grid: Grid, named: Arguments) -> None:
    """Normalises and rotates the queries and keys of a fused projection, in bfloat16."""
    tokens, heads = grid
    size, half = named["D"], named["D"] // 2
    queries = named["NHQ"]
    rows = named["qkv_ptr"].as_strided((tokens, heads, size), (named["row_stride"], size, 1))
    weights = torch.empty((heads, size))
    weights[:queries] = named["q_weight_ptr"].view(-1)[:size].float()
    weights[queries:] = named["k_weight_ptr"].view(-1)[:size].float()
    wide = rows.float()
    inverse = 1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + named["EPS"])
    normed = (wide * inverse * weights).bfloat16().float()
    angles = named["cos_sin_ptr"][named["pos_ptr"][:tokens]].float()
    cos, sin = angles[:, None, :half], angles[:, None, half:size]
    first, second = normed[..., :half], normed[..., half:]
    rows.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


_IN_TORCH: Final[dict[str, _TorchKernel]] = {
    "_draft_topk1_finalize_kernel": _TorchKernel(_find_argmax),
    "_draft_topk1_partial_argmax_kernel": _TorchKernel(_find_partial_argmax),
    "_fused_norm_rope_kernel_stacked": _TorchKernel(_norm_and_rotate_keys),
    "_small_copy_kernel": _TorchKernel(_copy_small),
    "_table_qk_norm_rope_kernel": _TorchKernel(_norm_and_rotate_in_place),
    "copy_all_layer_kv_cache_tiled": _TorchKernel(_copy_cache_rows),
    "create_flashinfer_kv_indices_triton": _TorchKernel(
        _list_slots, ENTRY_PAGE_SIZE=1, token_mapping=None
    ),
    "generate_draft_decode_kv_indices": _TorchKernel(
        _list_draft_slots, page_size=1, window_size=0, ENTRY_PAGE_SIZE=1, TRANSLATE=False
    ),
}
