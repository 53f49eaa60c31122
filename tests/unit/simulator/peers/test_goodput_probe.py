"""One window of each, then the best."""

import pytest

from controller.core.engine_spec import Arm
from simulator.peers.hill_climber import GoodputProbe
from tests.unit.simulator.peers.loop import ARMS, Loop, best_arm, constant


def test_every_draft_length_runs_for_one_window_and_plain_decoding_last():
    chosen = constant(GoodputProbe(ARMS, window_steps=2), 4, [5.0, 1, 2, 9, 3, 4], 14)
    assert chosen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0, 3, 3]


def test_of_those_within_the_margin_the_shortest_is_taken():
    rates = [90.0, 98.0, 100.0, 50.0, 50.0, 50.0]
    assert constant(GoodputProbe(ARMS, window_steps=2), 4, rates, 20)[-8:] == [1] * 8


def test_what_was_refused_is_not_tried_again_while_the_chosen_one_holds():
    policy = GoodputProbe(ARMS, window_steps=2)
    constant(policy, 4, [1.0, 2, 3, 4, 5, 6], 12)
    assert set(constant(policy, 4, [100.0, 100, 100, 100, 100, 6], 200)) == {5}


def test_bins_are_separate():
    policy = GoodputProbe(ARMS, window_steps=2)
    assert constant(policy, 4, [1.0, 2, 3, 4, 5, 6], 14)[-1] == 5
    assert constant(policy, 5, [6.0, 5, 4, 3, 2, 1], 14)[0] == 1


def test_at_a_large_batch_it_ends_at_plain_decoding():
    loop = Loop(GoodputProbe(ARMS))
    assert set(loop.run(1000, 256, 0.4)[-500:]) == {best_arm(ARMS, 256, 0.4)}


@pytest.mark.parametrize("gammas", [(0,), (4,), (0, 4), (2, 4)])
def test_it_lives_with_few_arms_and_any_batch(gammas):
    arms = tuple(Arm("mtp", g) for g in gammas)
    loop = Loop(GoodputProbe(arms, window_steps=2), arms=arms)
    for batch_size in (1, 65_536, 7):
        loop.run(60, batch_size, 0.5)
    assert set(loop.chosen) == set(range(len(arms)))
