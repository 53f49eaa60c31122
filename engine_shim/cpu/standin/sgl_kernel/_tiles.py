"""Ragged attention as rectangles: which cache rows, which mask, worked out once per forward pass.

Every layer of a forward pass asks for attention over the same sequences. The index into the key/value cache and the mask
are therefore made for the first layer and kept for the others (see ``_memo``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._rounding import least_attention_rows, padded_key_count

# A larger mask is split: by sequence, then by runs of queries.
_LARGEST_MASK = 1 << 23
_QUERY_RUN = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Attention of ``width`` queries in each of ``batch`` sequences over ``keys`` key slots.

    Attributes:
        cache_rows: ``[batch * keys]`` rows of the key/value cache; past a sequence's end its last row is repeated.
        bias: ``[batch, 1, rows, keys]`` float32, 0 where a query may look and -inf elsewhere; ``rows`` are the queries of
            one key head, folded as in ``fold`` (or ``width`` alone, where folding would only repeat a large mask).
        folds: query heads that share a key head and lie in ``rows``; 0 when the heads are not folded.
        repeats: how often the folded rows are repeated to reach a number of rows that rounds alike.
        query_rows: ``[batch * width]`` rows of the query tensor; None when they lie in order.
        output_from, output_to: rows of the tile's flat output that are real, and where they go; None for all, in order.
        fresh_to, fresh_from: where in ``cache_rows`` the pass's own tokens lie, and their rows in its key tensor;
            ``fresh_from`` None for all, in order.
    """

    batch: int
    width: int
    keys: int
    cache_rows: Tensor
    bias: Tensor
    folds: int
    repeats: int
    query_rows: Tensor | None = None
    output_from: Tensor | None = None
    output_to: Tensor | None = None
    fresh_to: Tensor | None = None
    fresh_from: Tensor | None = None


def _cache_rows(table: Tensor, requests: Tensor, lengths: Tensor, keys: int) -> Tensor:
    """``[batch * keys]`` int64: each request's slots, its last one repeated up to ``keys``."""
    positions = torch.minimum(torch.arange(keys), (lengths[:, None] - 1).clamp_(min=0))
    return table[requests[:, None], positions].long().flatten()


def _bias(visible: Tensor, folds: int, repeats: int) -> Tensor:
    """Bool ``[batch, width, keys]`` as the float mask ``[batch, 1, rows, keys]`` of a tile."""
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return bias.repeat(1, max(folds, 1) * repeats, 1).unsqueeze(1)


def _fold(width: int, group: int, head_size: int) -> tuple[int, int]:
    """``folds`` and ``repeats`` for ``width`` queries whose heads come in groups of ``group``."""
    least = least_attention_rows(head_size)
    if width >= max(least, 32):
        return 0, 1
    return group, -(-least // (group * width))


def decode_tiles(table: Tensor, requests: Tensor, lengths: Tensor, group: int, head_size: int) -> list[Tile]:
    """One query per sequence, the last of its ``lengths[i]`` tokens: a single tile."""
    requests, lengths = requests.long(), lengths.long()
    keys = padded_key_count(int(lengths.max()), head_size)
    visible = torch.arange(keys) < lengths[:, None, None].clamp(min=1)
    folds, repeats = _fold(1, group, head_size)
    rows = _cache_rows(table, requests, lengths, keys)
    return [Tile(len(lengths), 1, keys, rows, _bias(visible, folds, repeats), folds, repeats)]


def extend_tiles(
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    widths: Tensor,
    starts: Tensor,
    tree_mask: Tensor | None,
    causal: bool,
    group: int,
    head_size: int,
) -> list[Tile]:
    """The last ``widths[i]`` of each sequence's ``lengths[i]`` tokens are queries, in rows ``starts[i]`` on.

    ``tree_mask`` is bool, per sequence ``[width, width]`` one after the other: which new token sees which.
    """
    requests, lengths, widths, starts = requests.long(), lengths.long(), widths.long(), starts.long()
    live = widths.nonzero().flatten()
    if live.numel() == 0:
        return []
    trees = None
    if tree_mask is not None:
        if int(widths.min()) != int(widths.max()):
            raise ValueError("a tree mask needs the same number of draft tokens in every sequence")
        trees = tree_mask.view(-1)[: widths.numel() * int(widths[0]) ** 2].view(widths.numel(), int(widths[0]), -1).bool()

    def tile(chosen: Tensor, first: int, width: int) -> Tile:
        """Queries ``first .. first + width`` (where a sequence has so many) of the chosen sequences."""
        length, full, start = lengths[chosen], widths[chosen], starts[chosen]
        keys = padded_key_count(int(length.max()), head_size)
        slots, steps = torch.arange(keys), torch.arange(first, first + width)
        prefix = (length - full)[:, None]
        end = length[:, None, None]
        if not causal:
            visible = (slots < end).expand(len(chosen), width, keys)
        elif trees is None:
            visible = slots < torch.minimum((prefix + steps + 1)[:, :, None], end)
        else:
            visible = (slots < prefix[:, :, None]).expand(len(chosen), width, keys).clone()
            columns = (prefix + torch.arange(trees.shape[2]))[:, None, :].expand(-1, width, -1)
            visible.scatter_(2, columns, trees[chosen][:, first : first + width])
        folds, repeats = _fold(width, group, head_size)
        real = (steps < full[:, None]).flatten()
        source = (start[:, None] + torch.minimum(steps, full[:, None] - 1)).flatten()
        in_order = bool(real.all()) and torch.equal(source, torch.arange(source.numel()))
        if in_order:
            fresh_to = (torch.arange(len(chosen))[:, None] * keys + prefix + steps).flatten()
            fresh_from = output_from = output_to = query_rows = None
        else:
            owner = torch.repeat_interleave(torch.arange(len(chosen)), full)
            step = torch.arange(len(owner)) - torch.repeat_interleave(full.cumsum(0) - full, full)
            fresh_to = owner * keys + prefix.flatten()[owner] + step
            fresh_from = start[owner] + step
            query_rows, output_from = source, real.nonzero().flatten()
            output_to = source[output_from]
        rows = _cache_rows(table, requests[chosen], length, keys)
        bias = _bias(visible, folds, repeats)
        return Tile(
            len(chosen), width, keys, rows, bias, folds, repeats, query_rows, output_from, output_to, fresh_to, fresh_from
        )

    width = int(widths.max())
    if live.numel() * width * int(lengths.max()) <= _LARGEST_MASK:
        return [tile(live, 0, width)]
    return [
        tile(live[i : i + 1], first, min(_QUERY_RUN, int(widths[s]) - first))
        for i, s in enumerate(live.tolist())
        for first in range(0, int(widths[s]), _QUERY_RUN)
    ]
