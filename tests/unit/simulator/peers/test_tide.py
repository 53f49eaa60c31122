"""TIDE's threshold: Eq. 2, Eq. 5, and the switch that they make."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from lab.papers.tide import acceptance_length, acceptance_rate
from simulator.errors import InvalidInputError
from simulator.peers.tide import TideThreshold
from tests.unit.simulator.peers.loop import ARMS, Loop, profile_of, record, step_seconds

ON, OFF = 3, 0  # gamma 3, gamma 0


def fed(policy, length, sequences=1000):
    """The policy after steps whose mean acceptance length is `length` (1..4)."""
    share = (length - 1) / 3
    full = round(share * sequences)
    policy.observe(record(ON, ARMS, [sequences - full, 0, 0, full]), 0.0)
    return policy


@given(st.floats(1.0, 4.0), st.integers(1, 512))
def test_it_is_on_exactly_where_equation_5_gives_a_speedup_above_one(length, batch_size):
    policy = fed(TideThreshold(ARMS, profile_of(), 3), length)
    alpha = acceptance_rate(policy.acceptance_length, 3)
    assert alpha is not None
    speedup = acceptance_length(alpha, 3) / policy.relative_cost(batch_size)
    if math.isclose(speedup, 1.0, abs_tol=1e-9):
        return
    assert policy.choose(batch_size, 0.0).arm == (ON if speedup > 1 else OFF)


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256])
def test_at_profiled_sizes_the_relative_cost_is_the_measured_one(size):
    policy = TideThreshold(ARMS, profile_of(), 3)
    expected = step_seconds(3, size) / step_seconds(0, size)
    assert policy.relative_cost(size) == pytest.approx(expected)


def test_costs_are_held_constant_past_the_profile():
    policy = TideThreshold(ARMS, profile_of(), 3)
    assert policy.relative_cost(65_536) == policy.relative_cost(256)


def test_it_speculates_until_it_has_seen_enough():
    policy = TideThreshold(ARMS, profile_of(), 3, memory_sequences=50)
    assert policy.choose(256, 0.0).arm == ON
    fed(policy, 1.0, sequences=49)
    assert policy.choose(256, 0.0).arm == ON
    fed(policy, 1.0, sequences=1)
    assert policy.choose(256, 0.0).arm == OFF


def test_while_off_it_drafts_in_one_of_recheck_steps():
    policy = fed(TideThreshold(ARMS, profile_of(), 3, recheck_steps=10), 1.0)
    chosen = [policy.choose(64, 0.0).arm for _ in range(30)]
    assert [i for i, arm in enumerate(chosen) if arm == ON] == [9, 19, 29]


def test_it_comes_back_when_acceptance_does():
    loop = Loop(TideThreshold(ARMS, profile_of(), 3))
    assert loop.run(400, 32, 0.1)[-50:].count(OFF) >= 49
    assert set(loop.run(1500, 32, 0.9)[-50:]) == {ON}


def test_plain_steps_do_not_move_the_average():
    policy = fed(TideThreshold(ARMS, profile_of(), 3), 2.5)
    before = policy.acceptance_length
    policy.observe(record(OFF, ARMS, [64]), 0.0)
    assert policy.acceptance_length == before


@pytest.mark.parametrize(
    ("arms", "arm"), [((Arm("mtp", 0),), 0), ((Arm("mtp", 5),), 0), (ARMS[1:], 2)]
)
def test_with_nothing_to_decide_it_needs_no_costs(arms, arm):
    other = profile_of((Arm("ngram", 2),))
    policy = TideThreshold(arms, other, 3)
    assert {policy.choose(b, 0.0).arm for b in (1, 65_536)} == {arm}


def test_a_profile_without_its_arms_is_refused():
    with pytest.raises(InvalidInputError, match="no batch size is measured at both"):
        TideThreshold(ARMS, profile_of(ARMS[:3]), 3)
