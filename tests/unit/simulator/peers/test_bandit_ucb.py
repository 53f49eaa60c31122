"""The bandit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from simulator.peers.bandit_ucb import Reward, UcbBandit
from tests.unit.simulator.peers.loop import ARMS, GAMMAS, Loop, best_arm, constant


@pytest.mark.parametrize(("batch_size", "alpha"), [(8, 0.8), (32, 0.7), (64, 0.2)])
def test_it_finds_the_best_arm_with_small_regret(batch_size, alpha):
    loop = Loop(UcbBandit(ARMS))
    chosen = loop.run(3000, batch_size, alpha)
    assert loop.share_of_best(chosen, batch_size, alpha) > 0.97
    last = chosen[-1000:]
    assert max(set(last), key=last.count) == best_arm(ARMS, batch_size, alpha)


def test_every_arm_is_tried_twice_first():
    chosen = constant(UcbBandit(ARMS), 8, [1.0, 2, 3, 4, 5, 6], 12)
    assert chosen == [0, 1, 2, 3, 4, 5] * 2


def test_by_tokens_per_step_it_drafts_as_far_as_it_can_whatever_that_costs():
    loop = Loop(UcbBandit(ARMS, reward=Reward.TOKENS_PER_STEP))
    last = loop.run(2000, 256, 0.6)[-200:]
    assert max(set(last), key=last.count) == len(ARMS) - 1
    assert GAMMAS[best_arm(ARMS, 256, 0.6)] == 0


def test_each_octave_learns_for_itself():
    policy = UcbBandit(ARMS, exploration=0.01)
    constant(policy, 4, [1.0, 2, 3, 4, 5, 6], 100)
    assert constant(policy, 5, [6.0, 5, 4, 3, 2, 1], 100)[-1] == 0
    assert constant(policy, 4, [1.0, 2, 3, 4, 5, 6], 1) == [5]


def test_discounting_follows_a_shift_that_the_plain_bandit_misses():
    shares = []
    for discount in (1.0, 0.995):
        loop = Loop(UcbBandit(ARMS, discount=discount))
        loop.run(3000, 16, 0.9)
        shares.append(loop.share_of_best(loop.run(1500, 16, 0.2)[-500:], 16, 0.2))
    plain, discounted = shares
    assert plain < 0.85
    assert discounted > 0.93


def test_a_discounted_bandit_tries_again_what_it_has_forgotten():
    policy = UcbBandit(ARMS, discount=0.99)
    constant(policy, 8, [900.0, 1000, 900, 900, 900, 900], 3000)
    after = constant(policy, 8, [2000.0, 1000, 900, 900, 900, 900], 3000)
    assert after[-500:].count(0) > 400


@given(st.integers(0, 5))
def test_weights_that_grow_for_long_are_scaled_back_and_choose_as_before(peak):
    rates = [1000.0 - 300 * abs(i - peak) / 5 for i in range(len(ARMS))]
    # Past the largest weight after some 330 steps.
    policy = UcbBandit(ARMS, exploration=0.05, discount=0.5)
    last = constant(policy, 8, rates, 1200)[-200:]
    assert max(set(last), key=last.count) == peak


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_it_is_not_confused_by_late_reports(lag):
    loop = Loop(UcbBandit(ARMS), lag=lag)
    chosen = loop.run(2000, 32, 0.7)
    assert loop.share_of_best(chosen, 32, 0.7) > 0.96


@pytest.mark.parametrize("gammas", [(0,), (4,), (0, 4), (2, 4)])
def test_it_lives_with_few_arms_and_any_batch(gammas):
    arms = tuple(Arm("mtp", g) for g in gammas)
    loop = Loop(UcbBandit(arms), arms=arms, lag=3)
    for batch_size in (1, 65_536, 7):
        loop.run(60, batch_size, 0.5)
    assert set(loop.chosen) == set(range(len(arms)))
