"""What peers read off a step."""

from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import MAX_BATCH_SIZE
from controller.simulation.peers.readings import accepted_tokens, octave, octave_range


@given(st.integers(1, MAX_BATCH_SIZE))
def test_every_batch_size_lies_in_the_range_of_its_octave(batch_size):
    first, last = octave_range(octave(batch_size))
    assert first <= batch_size <= last


def test_octaves_follow_each_other_without_gap():
    assert [octave_range(o) for o in range(5)] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=50))
def test_accepted_tokens_are_those_of_all_sequences(lengths):
    counts = [lengths.count(k) for k in range(9)]
    assert accepted_tokens(counts) == sum(lengths)
