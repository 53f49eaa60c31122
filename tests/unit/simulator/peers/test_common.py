"""Arms by draft length, and what peers read off a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import MAX_BATCH_SIZE, Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import (
    RelativeCosts,
    accepted_tokens,
    arms_by_gamma,
    nearest_gamma,
    octave,
    octave_range,
    off_arm,
    speculating_arm,
)
from tests.unit.simulator.peers.loop import ARMS, profile_of, step_seconds

TWO = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 0), Arm("dflash", 8), Arm("dflash", 4))


def test_a_drafters_arms_come_in_ascending_draft_length():
    assert list(arms_by_gamma(TWO, "dflash").items()) == [(0, 2), (4, 4), (8, 3)]


@pytest.mark.parametrize(("target", "expected"), [(0, 1), (2, 1), (3, 3), (9, 5)])
def test_the_nearest_draft_length_is_the_shorter_one_of_two(target, expected):
    assert nearest_gamma((5, 1, 3), target) == expected


def test_an_arm_that_speculates_is_never_plain_decoding_while_there_is_another():
    assert speculating_arm(TWO, "mtp", 0) == 1
    assert speculating_arm((Arm("mtp", 0),), "mtp", 3) == 0


def test_plain_decoding_is_the_drafters_own_where_it_has_one():
    assert off_arm(TWO, "dflash") == 2
    assert off_arm(TWO[:2] + TWO[3:], "dflash") == 0
    assert off_arm(TWO[1:2], "mtp") is None


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


def test_relative_costs_are_the_measured_ones_and_lie_in_between():
    costs = RelativeCosts(profile_of(), ARMS, ARMS[0])
    for size in (1, 4, 16, 64, 256):
        expected = [step_seconds(arm.gamma, size) / step_seconds(0, size) for arm in ARMS]
        assert costs.ratios_at(size) == pytest.approx(expected)
    # Halfway between two sizes, in log b.
    middle = [(a + b) / 2 for a, b in zip(costs.ratios_at(16), costs.ratios_at(64), strict=True)]
    assert costs.ratios_at(32) == pytest.approx(middle)
    assert costs.ratios_at(MAX_BATCH_SIZE) == costs.ratios_at(256)


def test_plain_decoding_has_one_price_whoever_would_not_draft():
    costs = RelativeCosts(profile_of(TWO[1:2] + TWO[2:]), TWO, TWO[2])
    assert costs.ratios_at(7)[0] == costs.ratios_at(7)[2] == 1.0


def test_an_arm_without_a_size_in_common_is_refused():
    with pytest.raises(InvalidInputError, match=r"both Arm.*gamma=3.* and Arm.*gamma=0"):
        RelativeCosts(profile_of(TWO[:1]), TWO[1:2], TWO[0])
