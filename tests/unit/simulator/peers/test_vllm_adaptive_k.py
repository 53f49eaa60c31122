"""Acceptance by position, a cost model, and the draft length with the best quotient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.vllm import AdaptiveK
from tests.unit.simulator.peers.loop import (
    ARMS,
    GAMMAS,
    Loop,
    best_arm,
    profile_of,
    record,
    step_seconds,
)

NEVER = 10**9
DEEPEST = ARMS[-1].gamma


def taught(policy, rates):
    policy.acceptance = list(rates)
    return policy


@given(
    st.lists(st.floats(0.0, 1.0), min_size=DEEPEST, max_size=DEEPEST),
    st.sampled_from((1, 4, 16, 64, 256)),
)
def test_it_drafts_the_length_with_the_most_expected_tokens_a_second(rates, batch_size):
    policy = taught(AdaptiveK(ARMS, profile_of(), recheck_steps=NEVER), rates)
    goodputs = []
    for gamma in GAMMAS:
        expected, survival = 1.0, 1.0
        for rate in rates[:gamma]:
            survival *= rate
            expected += survival
        goodputs.append(expected / step_seconds(gamma, batch_size))
    chosen = policy.choose(batch_size, 0.0).arm
    assert goodputs[chosen] == pytest.approx(max(goodputs))


def test_without_a_profile_it_has_the_proposals_own_costs():
    """K = 1 at one sequence: (1 + a) / 1.1164 against 1 without a draft."""
    arms = ARMS[:2]
    for rate, gamma in ((0.116, 0), (0.117, 1)):
        policy = taught(AdaptiveK(arms, recheck_steps=NEVER), [rate])
        assert arms[policy.choose(1, 0.0).arm].gamma == gamma
    policy = taught(AdaptiveK(arms, recheck_steps=NEVER), [0.5])
    assert [policy.choose(b, 0.0).arm for b in (1, 1, 1, 250)] == [1, 1, 1, 0]


def test_what_was_never_reached_is_hoped_for():
    policy = taught(AdaptiveK(ARMS, profile_of()), [0.85, 0.85, *[None] * (DEEPEST - 2)])
    hoped = policy.choose(1, 0.0).arm
    assert hoped == taught(AdaptiveK(ARMS, profile_of()), [0.85] * DEEPEST).choose(1, 0.0).arm
    assert ARMS[hoped].gamma > 2


def test_a_positions_rate_is_of_those_that_reached_it():
    policy = AdaptiveK(ARMS, profile_of())
    for _ in range(9):
        policy.observe(record(3, ARMS, [4, 3, 2, 1]), 0.0)
    assert policy.acceptance[0] is None
    policy.observe(record(3, ARMS, [4, 3, 2, 1]), 0.0)
    assert policy.acceptance[:3] == [pytest.approx(0.6), pytest.approx(0.5), pytest.approx(1 / 3)]
    assert policy.acceptance[3:] == [None] * (DEEPEST - 3)


def test_windows_are_averaged_and_steps_without_drafts_are_not_in_them():
    policy = AdaptiveK(ARMS, profile_of())
    for counts in ([0, 8], [8, 0]):
        for _ in range(10):
            policy.observe(record(0, ARMS, [8]), 0.0)
            policy.observe(record(1, ARMS, counts), 0.0)
    assert policy.acceptance[0] == pytest.approx(0.7)


def test_after_a_change_it_stays_for_two_steps():
    policy = taught(AdaptiveK(ARMS, profile_of(), recheck_steps=NEVER), [0.95] * DEEPEST)
    long = policy.choose(1, 0.0).arm
    policy.acceptance = [0.0] * DEEPEST
    assert policy.choose(1, 0.0).arm == 0
    policy.acceptance = [0.95] * DEEPEST
    assert [policy.choose(1, 0.0).arm for _ in range(4)] == [0, 0, long, long]


def test_one_window_of_so_many_steps_drafts_one_length_more():
    policy = taught(AdaptiveK(ARMS, profile_of(), recheck_steps=50), [0.0] * DEEPEST)
    chosen = [policy.choose(1, 0.0).arm for _ in range(150)]
    assert chosen == ([0] * 40 + [1] * 10) * 3


def test_it_learns_what_to_run_and_follows_a_shift():
    loop = Loop(AdaptiveK(ARMS, profile_of()))
    for alpha in (0.8, 0.05, 0.8, 0.4):
        settled = loop.run(4000, 16, alpha)[-1000:]
        assert loop.share_of_best(settled, 16, alpha) > 0.97
        assert max(set(settled), key=settled.count) == best_arm(ARMS, 16, alpha)


def test_it_has_one_drafter_and_any_plain_decoding():
    arms = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 4), Arm("dflash", 8))
    policy = AdaptiveK(arms, profile_of(arms), drafter="dflash")
    chosen = Loop(policy, arms=arms).run(200, 4, 0.5) + Loop(policy, arms=arms).run(400, 4, 0.0)
    assert set(chosen) == {0, 2, 3}


def test_without_plain_decoding_it_drafts_as_little_as_it_can():
    policy = AdaptiveK(ARMS[2:], profile_of(), recheck_steps=NEVER)
    assert set(Loop(policy, arms=ARMS[2:]).run(400, 4, 0.0)[-200:]) == {0}


def test_a_profile_without_its_arms_is_refused():
    with pytest.raises(InvalidInputError, match="no batch size is measured at both"):
        AdaptiveK(ARMS, profile_of(ARMS[:3]))
