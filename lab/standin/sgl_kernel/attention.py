"""Attention over the paged key/value cache, for a whole batch at once.

The arithmetic is float32 whatever the model's dtype. In a float32 model a token's result has the
same bits whatever other sequences, and however many draft tokens, share the call (see
``_tiles``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._memo import Memo
from ._registry import operator
from ._tiles import Spans, Tile, extend_tiles
from .kv_cache import store_cache_cpu

_decode_memo: Memo[list[Tile]] = Memo()
_extend_memo: Memo[list[Tile]] = Memo()


def _reject(
    logit_cap: float, is_cross: bool, window: int, encoder_lens: Tensor | None, sinks: Tensor | None
) -> None:
    """Raises NotImplementedError, with its name, for what dense Qwen3/Llama models do not use."""
    if logit_cap > 0:
        feature = "logit soft-capping"
    elif is_cross or encoder_lens is not None:
        feature = "cross attention"
    elif window > 0:
        feature = "sliding windows"
    elif sinks is not None:
        feature = "attention sinks"
    else:
        return
    raise NotImplementedError(
        f"the CPU stand-in of sgl_kernel has no {feature}; use a dense full-attention model"
    )


def _gather(cache: Tensor, tile: Tile, fresh: Tensor | None) -> Tensor:
    """Gathers float32 ``[batch, heads, keys, size]`` from ``cache [slots, heads, size]``.

    ``fresh``, the pass's own rows, takes the place of what the cache holds for them.
    """
    rows = cache.index_select(0, tile.cache_rows)
    if fresh is not None and tile.fresh_slots is not None:
        fresh = fresh.view(-1, *cache.shape[1:])
        if tile.placement is not None:
            fresh = fresh.index_select(0, tile.placement.fresh)
        rows.index_copy_(0, tile.fresh_slots, fresh.to(rows.dtype))
    return rows.view(tile.batch, tile.keys, *cache.shape[1:]).transpose(1, 2).float()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float, output: Tensor
) -> None:
    """Writes attention over gathered keys and values into ``output [batch * width, heads, size]``.

    Heads that share a key head are folded into the rows of one product, ``group * width`` of them.
    """
    batch, width, shared = tile.batch, tile.width, key.shape[1]
    group = query.shape[1] // shared
    rows = group * width
    query = query.view(batch, width, shared, group, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, shared, rows, -1)
    if tile.spare:
        query = F.pad(query, (0, 0, 0, tile.spare))
    mixed = F.scaled_dot_product_attention(query, key, value, tile.bias, scale=scale)
    if tile.spare:
        mixed = mixed[:, :, :rows]
    mixed = mixed.view(batch, shared, group, width, -1).permute(0, 3, 1, 2, 4)
    output.view(batch, width, shared, group, -1).copy_(mixed)


def _first(rows: Tensor | None, count: int) -> Tensor | None:
    return None if rows is None else rows[:count]


def _attend_all(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    tiles: list[Tile],
    scale: float,
    output: Tensor,
) -> None:
    """Writes the attention of every tile into ``output``; see ``extend_attention_cpu``."""
    for tile in tiles:
        place = tile.placement
        if place is None:
            described = tile.batch * tile.width
            if described < len(query):
                output[described:] = float("nan")
                query, output = query[:described], output[:described]
                key, value = _first(key, described), _first(value, described)
            keys, values = _gather(k_cache, tile, key), _gather(v_cache, tile, value)
            _attend(query.float(), keys, values, tile, scale, output)
            continue
        keys, values = _gather(k_cache, tile, key), _gather(v_cache, tile, value)
        padded = output.new_empty(tile.batch * tile.width, *output.shape[1:])
        rows = query.index_select(0, place.queries).float()
        _attend(rows, keys, values, tile, scale, padded)
        output.index_copy_(0, place.outputs, padded.index_select(0, place.real))


@operator
def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Stores one new token per sequence, then attends over each sequence; writes ``output``.

    Args:
        query: ``[sequences, heads, size]``; ``output`` likewise with the value size.
        k_cache, v_cache: ``[slots, key heads, size]``.
        key, value: the new tokens' rows, stored into slots ``loc [sequences]``; None when they are
            stored already.
        attn_logits: scratch of the compiled operator, unused.
        req_to_token: ``[requests, pool_len]`` slot of every position; row ``req_pool_indices[i]``
            is sequence i's.
        seq_lens: ``[sequences]`` tokens, the new one included.

    Raises:
        NotImplementedError: for soft-capping, cross attention, sliding windows and sinks.
    """
    _reject(logit_cap, is_cross_attention, sliding_window, encoder_lens, sinks)
    if key is not None and value is not None:
        store_cache_cpu(key, value, k_cache, v_cache, loc, k_cache.shape[1] * k_cache.shape[2])
    group, size = query.shape[1] // k_cache.shape[1], query.shape[2]
    count = len(seq_lens)

    def make() -> list[Tile]:
        # A sequence without a token, in a padded batch, reads one row of the cache.
        lengths, widths = seq_lens.long().clamp(min=1), torch.ones(count, dtype=torch.int64)
        spans = Spans(req_pool_indices[:count].long(), lengths, widths, torch.arange(count))
        return extend_tiles(req_to_token, spans, group, size, causal=True)

    tiles = _decode_memo.get(req_to_token, (req_pool_indices, seq_lens), (group, size), make)
    _attend_all(query, k_cache, v_cache, None, None, tiles, sm_scale, output)


def _attend_new(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    scale: float,
) -> None:
    """Attends among new tokens whose cache holds latent rows instead of keys and values (MLA).

    Each sequence is computed alone; see ``extend_attention_cpu``.

    Raises:
        NotImplementedError: a sequence has tokens in the cache.
    """
    if not torch.equal(seq_lens, extend_seq_lens):
        raise NotImplementedError("the stand-in reads latent rows of a prefix as latent rows only")
    group, first = query.shape[1] // key.shape[1], 0
    for length in extend_seq_lens.tolist():
        rows = slice(first, first + length)
        heads = (query[rows], *(x[rows].repeat_interleave(group, 1) for x in (key, value)))
        q, k, v = (x.transpose(0, 1).float()[None] for x in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        output[rows].copy_(mixed[0].transpose(0, 1))
        first += length


def _spans(
    requests: Tensor, lengths: Tensor, widths: Tensor, starts: Tensor, tree_mask: Tensor | None
) -> Spans:
    """Turns the arguments of ``extend_attention_cpu`` into spans.

    Raises:
        ValueError: for a tree mask over sequences with different numbers of new tokens.
    """
    trees = None
    if tree_mask is not None:
        width = int(widths.max())
        if int(widths.min()) != width:
            raise ValueError("a tree mask needs the same number of draft tokens in every sequence")
        trees = tree_mask.view(-1)[: len(widths) * width * width].view(-1, width, width).bool()
    requests = requests[: len(lengths)].long()
    return Spans(requests, lengths.long(), widths.long(), starts.long(), trees)


@operator
def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attends from the new tokens of every sequence; writes ``output`` in place.

    Args:
        query: ``[tokens, heads, size]``; sequence i's ``extend_seq_lens[i]`` new tokens are rows
            ``extend_start_loc[i]`` on.  ``output`` likewise.
        key, value: the new tokens' rows, used instead of what the cache holds for them; None to
            read the cache.
        k_buffer, v_buffer: ``[slots, key heads, size]``, only read.
        seq_lens: ``[sequences]`` tokens, new ones included; the other arguments as in
            ``decode_attention_cpu``.
        tree_mask: bool, flat, per sequence ``[new, new]``: which new token sees which; None for a
            chain.
        is_causal: False lets every new token see the whole sequence.

    Raises:
        NotImplementedError: for soft-capping, cross attention, sliding windows and sinks.
        ValueError: for a tree mask over sequences with different numbers of new tokens.
    """
    _reject(logit_cap, is_cross_attention, sliding_window, encoder_lens, sinks)
    if (
        key is not None
        and value is not None
        and key.shape[1:].numel() != k_buffer.shape[1:].numel()
    ):
        _attend_new(query, key, value, output, seq_lens, extend_seq_lens, sm_scale)
        return
    group, size = query.shape[1] // k_buffer.shape[1], query.shape[2]
    trees = tree_mask if is_causal else None
    tiles = _extend_memo.get(
        req_to_token,
        (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, trees),
        (group, size, is_causal),
        lambda: extend_tiles(
            req_to_token,
            _spans(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, trees),
            group,
            size,
            causal=is_causal,
        ),
    )
    _attend_all(query, k_buffer, v_buffer, key, value, tiles, sm_scale, output)
