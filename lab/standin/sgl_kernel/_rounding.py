"""Finds out by trying how this machine's matrix products round.

Speculative decoding is exact only if a token's logits do not depend on how many tokens are computed
beside it.  In float32 they do: a BLAS picks its kernel, and with it the order of its additions, by
the shape of the product.  But not every shape makes a difference.  With MKL on an AVX-512 machine a
row of ``x @ w.T`` has the same bits for any number of rows from 4 on, and padding a sum with zeros
changes nothing as long as the BLAS cuts the padded sum at the same places.  So products are given
shapes for which the bits agree; which those are is measured, once per shape and on random numbers,
not taken for granted.
"""

from collections.abc import Callable
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


def _least_rows(product: Callable[[int], Tensor]) -> int:
    """Returns from how many rows on ``product(rows)`` rounds a row alike."""
    with torch.inference_mode():
        reference = product(_PROBE_ROWS)
        for least in _ROW_COUNTS:
            counts = (least, least + 1, least + 3, 2 * least, 3 * least)
            if all(torch.equal(product(n), reference[:n]) for n in counts):
                return least
    return _ROW_COUNTS[-1]


@cache
def least_linear_rows(outputs: int, inputs: int) -> int:
    """Returns the least rows for ``F.linear`` with a weight ``[outputs, inputs]``."""
    weight, x = _draw(min(outputs, _PROBE_OUTPUTS), inputs), _draw(_PROBE_ROWS, inputs)
    return _least_rows(lambda rows: F.linear(x[:rows].clone(), weight))


@cache
def least_attention_rows(head_size: int) -> int:
    """Returns the least query rows for attention over a full key block."""
    return _least_rows(lambda rows: _probe_attention(rows, KEY_BLOCK, head_size))


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
    blocks, rest = divmod(longest, KEY_BLOCK)
    if rest == 0 and blocks:
        return longest
    return blocks * KEY_BLOCK + next(count for count in safe_key_counts(head_size) if count >= rest)
