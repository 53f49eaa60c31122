"""Reading and writing rows of the key/value cache."""

import ctypes

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
    for given, cache in ((key, key_cache), (value, value_cache)):
        rows = given if given.dtype == cache.dtype else given.to(cache.dtype)
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
