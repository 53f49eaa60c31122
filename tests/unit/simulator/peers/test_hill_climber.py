"""Hill climbing on measured tokens per second."""

import pytest

from controller.core.engine_spec import Arm
from simulator.peers.hill_climber import HillClimber
from tests.unit.simulator.peers.loop import (
    ARMS,
    GAMMAS,
    Loop,
    best_arm,
    constant,
)


@pytest.mark.parametrize("peak", range(len(ARMS)))
def test_it_finds_a_unimodal_maximum_from_any_side(peak):
    rates = [1000.0 - 100 * abs(i - peak) for i in range(len(ARMS))]
    chosen = constant(HillClimber(ARMS, window_steps=4), 8, rates, 1000)
    settled = chosen[-500:]
    assert settled.count(peak) / len(settled) > 0.8


def test_it_probes_by_whole_windows_and_goes_on_while_it_improves():
    rates = [100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
    chosen = constant(HillClimber(ARMS, window_steps=3), 8, rates, 15)
    assert chosen == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3


def test_a_gain_within_the_margin_is_refused_and_the_other_side_tried_next():
    rates = [100.0, 200.0, 205.0, 0.1, 0.1, 0.1]
    chosen = constant(HillClimber(ARMS, window_steps=2, hold_windows=3), 8, rates, 20)
    assert chosen == [1, 1, 2, 2, 1, 1, 0, 0, *[1] * 6, 2, 2, *[1] * 4]


def test_each_octave_remembers_its_own_place():
    low, high = [600.0, 500, 400, 300, 200, 100], [100.0, 200, 300, 400, 500, 600]
    policy = HillClimber(ARMS, window_steps=2, hold_windows=50)
    constant(policy, 1, high, 200)
    constant(policy, 64, low, 200)
    assert constant(policy, 1, high, 1) == [5]
    assert constant(policy, 64, low, 1) == [0]


def test_a_new_octave_starts_where_the_last_one_stands():
    policy = HillClimber(ARMS, window_steps=2)
    constant(policy, 1, [100.0, 200, 300, 400, 500, 600], 100)
    assert policy.choose(2, 0.0).arm == 5


@pytest.mark.parametrize(("batch_size", "alpha"), [(16, 0.8), (64, 0.3), (256, 0.7)])
def test_in_a_noisy_loop_it_stays_near_the_best(batch_size, alpha):
    loop = Loop(HillClimber(ARMS))
    chosen = loop.run(2000, batch_size, alpha)[-1000:]
    assert loop.share_of_best(chosen, batch_size, alpha) > 0.95


def test_it_follows_a_shift():
    loop = Loop(HillClimber(ARMS))
    loop.run(2000, 32, 0.9)
    after = loop.run(4000, 32, 0.1)[-1000:]
    assert loop.share_of_best(after, 32, 0.1) > 0.95
    assert best_arm(ARMS, 32, 0.1) == GAMMAS.index(0)


@pytest.mark.parametrize("gammas", [(0,), (4,), (0, 4), (2, 4)])
def test_it_lives_with_few_arms_and_any_batch(gammas):
    arms = tuple(Arm("mtp", g) for g in gammas)
    loop = Loop(HillClimber(arms, window_steps=2), arms=arms)
    for batch_size in (1, 65_536, 7):
        loop.run(60, batch_size, 0.5)
    assert set(loop.chosen) == set(range(len(arms)))
