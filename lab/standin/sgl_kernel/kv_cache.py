"""Reads and writes rows of the key/value cache, and the map from token positions to them.

``req_to_token [requests, pool_len]`` (int32) holds, in row r, the cache slot of every position of
request r. The spans of a call are ragged: request i covers positions ``start[i] .. end[i]``
(exclusive), and its slots lie one request after the other in a flat tensor.
"""

import ctypes

import torch
from torch import Tensor

from ._registry import operator


@operator
def store_cache_cpu(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: Tensor,
    row_size: int,
) -> None:
    """Write token ``i``'s key and value into cache row ``indices[i]``, in place.

    Args:
        key, value: one row of ``row_size`` numbers per token, in any shape.
        key_cache, value_cache: ``[slots, ...]`` with ``row_size`` numbers per slot; rows are cast
            to their dtype.
        indices: ``[tokens]`` slots, distinct.
    """
    for source, cache in ((key, key_cache), (value, value_cache)):
        rows = source if source.dtype == cache.dtype else source.to(cache.dtype)
        if rows.shape[1:] == cache.shape[1:]:
            cache.index_copy_(0, indices, rows)
        else:
            cache.view(-1, row_size).index_copy_(0, indices, rows.reshape(-1, row_size))


@operator
def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy row ``src_loc[i]`` to row ``tgt_loc[i]``, in every buffer.

    Args:
        data_ptrs: ``[buffers]`` base addresses (uint64), one per layer and side.
        strides: ``[buffers]`` bytes per row.
        tgt_loc, src_loc: ``[rows]``; they may overlap, all rows are read before any is written.
    """
    pairs = [
        (target, source)
        for target, source in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True)
        if target != source
    ]
    if not pairs:
        return
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def _spans(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column in ``req_to_token`` of every position in the spans, ``[total]`` each."""
    lengths = end - start
    rows = torch.repeat_interleave(req_pool_indices.long(), lengths)
    first = torch.repeat_interleave((start - (lengths.cumsum(0) - lengths)).long(), lengths)
    return rows, first + torch.arange(rows.numel())


@operator
def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the flat slots ``out_cache_loc`` into the spans of ``req_to_token``, in place."""
    rows, columns = _spans(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


@operator
def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the spans of ``req_to_token`` into the flat ``out_cache_loc``, in place."""
    rows, columns = _spans(req_pool_indices, start, end)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


@operator
def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read ``topk * num_steps`` slots per request into ``out_cache_loc``, in place.

    They are those of position ``seq_lens[i]`` and the following ones.
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns].flatten()
    out_cache_loc[: slots.numel()] = slots.to(out_cache_loc.dtype)


@operator
def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """One row of slots per draft branch: ``[requests * topk, pool_len]``, a new tensor.

    Branch t of a request drafts into positions ``seq_len + t * num_steps`` on; seen from inside the
    branch those come right after the prefix.
    """
    rows = req_pool_indices.long()
    table = req_to_token[rows].repeat_interleave(topk, 0)
    if topk == 1:  # the only branch already lies behind the prefix
        return table
    steps = torch.arange(num_steps)
    branch = torch.arange(topk) * num_steps
    start = seq_lens.long()[:, None]
    source = (start + branch)[:, :, None] + steps
    target = (start + steps).repeat_interleave(topk, 0)
    table.scatter_(1, target, req_to_token[rows[:, None, None], source].flatten(0, 1))
    return table
