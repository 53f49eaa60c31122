"""Measures how this machine's matrix products round.

Speculative decoding is exact only if a token's logits do not depend on how many tokens are computed
beside it.  In float32 they do: a BLAS picks its kernel, and with it the order of its additions, by
the shape of the product.  But not every shape makes a difference.  With MKL on an AVX-512 machine a
row of ``x @ w.T`` has the same bits for any number of rows from 4 on, and padding a sum with zeros
changes nothing as long as the BLAS cuts the padded sum at the same places.  So products are given
shapes for which the bits agree; which those are is measured, once per shape and on random numbers,
not taken for granted.

Also cuts ragged attention into rectangles: which cache rows, which mask.

Every layer of a forward pass asks for attention over the same sequences.  The index into the
key/value cache and the mask are therefore made for the first layer and kept for the others (see
``_memo``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# scaled_dot_product_attention walks over the keys in blocks of this size (kvSplitSize of ATen's CPU
# flash attention); a whole block is the shape every shorter one is compared with.
KEY_BLOCK = 512
_KEY_STEP = 32
_ROW_COUNTS = (1, 2, 4, 8, 16)
_PROBE_ROWS = 64
# A larger weight is tiled over its outputs, so it behaves like one of this many.
_PROBE_OUTPUTS = 4096


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


def _min_aligned_rows(product: Callable[[int], Tensor]) -> int:
    """Returns from how many rows on ``product(rows)`` rounds a row alike."""
    with torch.inference_mode():
        reference = product(_PROBE_ROWS)
        for row_count in _ROW_COUNTS:
            counts = (row_count, row_count + 1, row_count + 3, 2 * row_count, 3 * row_count)
            if all(torch.equal(product(n), reference[:n]) for n in counts):
                return row_count
    return _ROW_COUNTS[-1]


@cache
def min_linear_rows(outputs: int, inputs: int) -> int:
    """Returns the least rows for ``F.linear`` with a weight ``[outputs, inputs]``."""
    weight, x = _draw(min(outputs, _PROBE_OUTPUTS), inputs), _draw(_PROBE_ROWS, inputs)
    return _min_aligned_rows(lambda rows: F.linear(x[:rows].clone(), weight))


@cache
def min_attention_rows(head_size: int) -> int:
    """Returns the least query rows for attention over a full key block."""
    return _min_aligned_rows(lambda rows: _probe_attention(rows, KEY_BLOCK, head_size))


def _probe_attention(rows: int, keys: int, head_size: int) -> Tensor:
    """Computes attention of probe rows over ``keys`` key slots: ``[rows, head_size]``.

    Row i sees the first ``7 i + 1`` slots.  Rows that would see more than ``keys`` are left out, so
    that a row is the same sum at every ``keys``.
    """
    visible = 7 * torch.arange(_PROBE_ROWS) + 1
    rows = min(rows, int((visible <= keys).sum()))
    bias = torch.zeros(rows, keys, dtype=torch.float32).masked_fill_(
        torch.arange(keys) >= visible[:rows, None], float("-inf")
    )
    query, key, value = (
        _draw(n, head_size)[:m].clone()[None, None]
        for n, m in ((_PROBE_ROWS, rows), (KEY_BLOCK, keys), (KEY_BLOCK + 1, keys))
    )
    return F.scaled_dot_product_attention(query, key, value, bias)[0, 0]


@cache
def safe_key_counts(head_size: int) -> tuple[int, ...]:
    """Returns the numbers of key slots, ascending, that have the full block's bits."""
    with torch.inference_mode():
        reference = _probe_attention(_PROBE_ROWS, KEY_BLOCK, head_size)
        safe = []
        for count in range(_KEY_STEP, KEY_BLOCK, _KEY_STEP):
            probe = _probe_attention(_PROBE_ROWS, count, head_size)
            if torch.equal(probe, reference[: probe.shape[0]]):
                safe.append(count)
    return (*safe, KEY_BLOCK)


@cache
def padded_key_count(longest: int, head_size: int) -> int:
    """Returns how many key slots a batch is padded to; longest: tokens of its longest sequence."""
    blocks, remainder = divmod(longest, KEY_BLOCK)
    if remainder == 0 and blocks:
        return longest
    return blocks * KEY_BLOCK + next(
        count for count in safe_key_counts(head_size) if count >= remainder
    )


# A larger mask (in numbers) is split: by sequence, then by runs of queries.
LARGEST_MASK = 1 << 24
QUERY_RUN = 256


@dataclass(frozen=True, slots=True)
class Spans:
    """The new tokens of a batch: the last ``widths[i]`` of sequence i's ``lengths[i]`` tokens.

    Attributes:
        requests: ``[sequences]`` rows of the slot table.
        lengths: ``[sequences]`` tokens, new ones included.
        widths: ``[sequences]`` new tokens, maybe none.
        starts: ``[sequences]`` first row of a sequence's new tokens in the pass's tensors.
        trees: bool ``[sequences, width, width]``, which new token sees which; None for a chain.
    """

    requests: Tensor
    lengths: Tensor
    widths: Tensor
    starts: Tensor
    trees: Tensor | None = None

    def pick(self, selection: Tensor) -> Spans:
        """Picks the spans of the chosen sequences."""
        return Spans(
            self.requests[selection],
            self.lengths[selection],
            self.widths[selection],
            self.starts[selection],
            None if self.trees is None else self.trees[selection],
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows that a ragged tile takes and gives; all are int64 row numbers.

    Attributes:
        queries: ``[batch * width]`` rows of the query; a shorter sequence repeats its last one.
        real: which rows of the tile are no such repeats.
        outputs: where those go.
        fresh: rows of the pass's key tensor that belong into the tile's gathered keys.
    """

    queries: Tensor
    real: Tensor
    outputs: Tensor
    fresh: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Attention of ``width`` queries in each of ``batch`` sequences over ``keys`` key slots.

    Attributes:
        cache_rows: ``[batch * keys]`` rows of the key/value cache; past a sequence's end its last
            row is repeated.
        bias: ``[batch, 1, rows, keys]`` float32, 0 where a query may look and -inf elsewhere.  The
            rows are the queries of all heads that share a key head, and ``spare`` ones.
        spare: rows added so that the products round alike (see ``_tiles``).
        fresh_slots: where among the gathered keys the pass's own tokens belong; None: nowhere.
        placement: None when queries, outputs and new keys are used whole and in order.
    """

    batch: int
    width: int
    keys: int
    cache_rows: Tensor
    bias: Tensor
    spare: int
    fresh_slots: Tensor | None = None
    placement: Placement | None = None


def extend_tiles(
    table: Tensor, spans: Spans, group: int, head_size: int, *, causal: bool
) -> list[Tile]:
    """Makes the tiles in which the new tokens of ``spans`` are the queries.

    Args:
        table: ``[requests, positions]`` cache row of every token.
        spans: the new tokens.
        group: query heads per key head.
        head_size: numbers per head.
        causal: False lets every new token see the whole sequence.
    """
    live = spans.widths.nonzero().flatten()
    if live.numel() == 0:
        return []
    if live.numel() < spans.widths.numel():
        spans = spans.pick(live)
    count, width = len(spans.widths), int(spans.widths.max())

    def tile(part: Spans, steps: Tensor, *, covers_pass: bool) -> Tile:
        keys = padded_key_count(int(part.lengths.max()), head_size)
        bias, spare = _bias(_visible(part, steps, keys, causal=causal), group, head_size)
        rows = _cache_rows(table, part.requests, part.lengths, keys)
        sizes = (len(part.widths), len(steps), keys)
        if covers_pass:
            slots = ((part.lengths - width)[:, None] + steps + _offsets(part, keys)).flatten()
            return Tile(*sizes, rows, bias, spare, slots)
        slots, placement = _place(part, steps, keys)
        return Tile(*sizes, rows, bias, spare, slots, placement)

    if count * group * width * int(spans.lengths.max()) <= LARGEST_MASK:
        in_order = torch.equal(spans.starts, torch.arange(count) * width)
        uniform = int(spans.widths.min()) == width
        return [tile(spans, torch.arange(width), covers_pass=in_order and uniform)]
    return [tile(part, steps, covers_pass=False) for part, steps in _split(spans)]


def _split(spans: Spans) -> Iterator[tuple[Spans, Tensor]]:
    for i, width in enumerate(spans.widths.tolist()):
        for first in range(0, width, QUERY_RUN):
            yield spans.pick(torch.tensor([i])), torch.arange(first, min(first + QUERY_RUN, width))


def _offsets(spans: Spans, keys: int) -> Tensor:
    """Returns the first gathered row of every sequence, ``[sequences, 1]``."""
    return (torch.arange(len(spans.widths)) * keys)[:, None]


def _cache_rows(table: Tensor, requests: Tensor, lengths: Tensor, keys: int) -> Tensor:
    """Returns each request's slots ``[sequences * keys]``, the last one repeated up to ``keys``."""
    positions = torch.minimum(torch.arange(keys), (lengths[:, None] - 1).clamp_(min=0))
    return table[requests[:, None], positions].long().flatten()


def _visible(spans: Spans, steps: Tensor, keys: int, *, causal: bool) -> Tensor:
    """Returns which key slot new token ``steps[j]`` may see: ``[sequences, len(steps), keys]``."""
    shape = (len(spans.widths), len(steps), keys)
    slots = torch.arange(keys)
    lengths, prefixes = spans.lengths[:, None, None], (spans.lengths - spans.widths)[:, None, None]
    if not causal:
        return (slots < lengths).expand(shape)
    if spans.trees is None:
        return slots < torch.minimum(prefixes + steps[:, None] + 1, lengths)
    visible = (slots < prefixes).expand(shape).clone()
    width = spans.trees.shape[2]
    columns = (prefixes + torch.arange(width)).expand(-1, len(steps), -1)
    return visible.scatter_(2, columns, spans.trees[:, steps])


def _bias(visible: Tensor, group: int, head_size: int) -> tuple[Tensor, int]:
    """Makes a tile's float mask from bool ``[batch, width, keys]``, and its number of spare rows.

    Attention cuts its queries into runs of a power of two; with a number of rows that is a multiple
    of the least one, the last run has that many too.
    """
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).repeat(1, group, 1)
    spare = -bias.shape[1] % min_attention_rows(head_size)
    return torch.nn.functional.pad(bias, (0, 0, 0, spare)).unsqueeze(1), spare


def _place(spans: Spans, steps: Tensor, keys: int) -> tuple[Tensor, Placement]:
    """Returns fresh slots and placement of new tokens ``steps``, where widths differ."""
    widths, starts = spans.widths[:, None], spans.starts[:, None]
    queries = (starts + torch.minimum(steps, widths - 1)).flatten()
    real = (steps < widths).flatten().nonzero().flatten()
    every = torch.arange(int(spans.widths.max()))
    new = every < widths
    slots = ((spans.lengths[:, None] - widths) + every + _offsets(spans, keys))[new]
    return slots, Placement(queries, real, queries[real], (starts + every)[new])
