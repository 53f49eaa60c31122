"""Reads off a step what peers learn from."""

from collections.abc import Sequence


def octave(batch_size: int) -> int:
    """Batch sizes 2^(o-1)+1 .. 2^o have octave o: 1, 2, 3-4, 5-8, ..."""
    return (batch_size - 1).bit_length()


def octave_range(index: int) -> tuple[int, int]:
    """(first, last) batch size of an octave."""
    return (1 << (index - 1)) + 1 if index else 1, 1 << index


def accepted_tokens(counts: Sequence[int]) -> int:
    """Accepted draft tokens of a step from its gamma + 1 counts (bonus tokens excluded)."""
    total = 0
    for accepted, sequences in enumerate(counts):
        total += accepted * sequences
    return total
