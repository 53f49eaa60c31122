"""Finds how much of the newest text a prompt lookup finds again, at every position of an output."""

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.mixtures import LEAST_MATCH, LONGEST_MATCH


def match_lengths(tokens: NDArray[np.int64], first: int) -> NDArray[np.uint8]:
    """[outputs] length of the longest suffix, 2 to 5 tokens, that occurred before; 0: none.

    tokens: prompt and output.  first: length of the prompt.  Entry p is what a lookup finds when
    the prompt and p tokens of the output are known.
    """
    count = len(tokens)
    found = np.zeros(count, dtype=np.uint8)
    # Equal numbers for equal sequences of k tokens, by their first token.
    number = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    for k in range(2, min(LONGEST_MATCH, count) + 1):
        pairs = number[:-1] * count + np.unique(tokens[k - 1 :], return_inverse=True)[1]
        _, begins, number = np.unique(pairs, return_index=True, return_inverse=True)
        repeated = begins[number] < np.arange(len(number))
        if k >= LEAST_MATCH:
            # A sequence that begins at i is the suffix where i + k tokens are known.
            known = np.flatnonzero(repeated) + k
            found[known[known < count]] = k
    return found[first:]
