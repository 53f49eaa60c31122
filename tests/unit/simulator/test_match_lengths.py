"""What a lookup finds again is the longest suffix that occurred before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.acceptance_trace import match_lengths


def find_lengths(tokens, first):
    return match_lengths(np.array(tokens, dtype=np.int64), first).tolist()


def by_search(tokens, first):
    lengths = []
    for end in range(first, len(tokens)):
        known = tokens[:end]
        fits = [
            k
            for k in (2, 3, 4, 5)
            if any(known[i : i + k] == known[end - k :] for i in range(end - k))
        ]
        lengths.append(max(fits, default=0))
    return lengths


def test_a_copy_is_found_from_its_third_token_on():
    assert find_lengths([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 8], 8) == [0, 0, 2, 3, 4, 5, 5]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_every_length_is_what_a_search_finds(tokens, data):
    first = data.draw(st.integers(0, len(tokens)))
    assert find_lengths(tokens, first) == by_search(tokens, first)
