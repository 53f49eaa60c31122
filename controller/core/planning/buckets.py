"""Divides the batch sizes of an engine into the buckets of its plans."""

from bisect import bisect_left
from collections.abc import Sequence

# Every batch size up to here has its own row; beyond, rows are about an eighth apart.
_EXACT_BUCKETS = 8


# Memory and time per engine grow with arms times buckets.
_BUCKETS_MAX = 128
_CELLS_MAX = 4096


def batch_buckets(
    max_batch_size: int, graph_batch_sizes: Sequence[int] = (), arms: int = 1
) -> tuple[int, ...]:
    """Returns the ascending upper ends of the plan's batch buckets, up to `max_batch_size`.

    An engine with captured graphs pads a batch to the next captured size: then those sizes are the
    buckets.  There are at most 128, or as many as make 4096 with so many arms; where an engine has
    captured more sizes, neighbours share a bucket, which begins with the large ones.
    """
    if graph_batch_sizes:
        sizes = {b for b in graph_batch_sizes if b < max_batch_size}
    else:
        sizes = set(range(1, min(_EXACT_BUCKETS, max_batch_size) + 1))
        size = float(_EXACT_BUCKETS)
        while size < max_batch_size:
            size *= 1.19
            sizes.add(min(round(size), max_batch_size))
    most = max(1, min(_BUCKETS_MAX, _CELLS_MAX // arms))
    return _coarse([*sorted(sizes - {max_batch_size}), max_batch_size], most)


def _coarse(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Keeps at most so many of the ascending sizes, evenly apart in log B, the last included."""
    if len(sizes) <= most:
        return tuple(sizes)
    *captured, last = sizes
    kept: list[int] = []
    at, left = 0, most - 1
    while left > 0 and at < len(captured):
        kept.append(captured[at])
        left -= 1
        # The rest of the range is divided into equal ratios, one for each bucket that is left.
        ratio = (captured[-1] / captured[at]) ** (1 / left) if left else 1.0
        at = max(at + 1, bisect_left(captured, captured[at] * ratio * (1 - 1e-9)))
    return (*kept, last)
