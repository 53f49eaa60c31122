"""The gate that closes once."""

import pytest

from controller.core.engine_spec import Arm
from controller.simulation.peers.trtllm_gate import SpeculationGate
from tests.unit.controller.simulation.peers.loop import ARMS, Loop, record

ON, OFF = 3, 0


def test_good_acceptance_keeps_it_open():
    loop = Loop(SpeculationGate(ARMS, 3))
    assert set(loop.run(500, 16, 0.8)) == {ON}


def test_once_closed_it_never_comes_back():
    policy = SpeculationGate(ARMS, 3)
    loop = Loop(policy)
    loop.run(100, 16, 0.1)
    assert policy.closed
    assert set(loop.run(1000, 16, 0.95)) == {OFF}
    policy.observe(record(ON, ARMS, [0, 0, 0, 100]), 0.0)
    assert policy.choose(1, 0.0).arm == OFF


def test_it_does_not_judge_before_the_window_is_full():
    policy = SpeculationGate(ARMS, 3, window=100)
    policy.observe(record(ON, ARMS, [99, 0, 0, 0]), 0.0)
    assert not policy.closed
    policy.observe(record(ON, ARMS, [1, 0, 0, 0]), 0.0)
    assert policy.closed


@pytest.mark.parametrize(("accepted", "closed"), [(59, True), (60, False)])
def test_it_closes_below_the_threshold_and_not_at_it(accepted, closed):
    policy = SpeculationGate(ARMS, 3, threshold=0.6, window=100)
    policy.observe(record(ON, ARMS, [100 - accepted, accepted, 0, 0]), 0.0)
    assert policy.closed is closed


def test_what_left_the_window_does_not_count():
    policy = SpeculationGate(ARMS, 3, threshold=0.6, window=100)
    for _ in range(10):
        policy.observe(record(ON, ARMS, [0, 0, 0, 50]), 0.0)
    policy.observe(record(ON, ARMS, [50, 0, 0, 0]), 0.0)
    assert not policy.closed
    policy.observe(record(ON, ARMS, [50, 0, 0, 0]), 0.0)
    assert policy.closed


def test_past_the_limit_it_pauses_and_counts_nothing():
    policy = SpeculationGate(ARMS, 3, max_concurrency=16, window=50)
    loop = Loop(policy)
    assert set(loop.run(100, 17, 0.0)) == {OFF}
    assert not policy.closed
    assert policy.choose(16, 0.0).arm == ON


@pytest.mark.parametrize("arms", [(Arm("mtp", 0),), (Arm("mtp", 5),), ARMS[1:]])
def test_without_a_choice_it_runs_what_there_is(arms):
    loop = Loop(SpeculationGate(arms, 3, 8), arms=arms)
    before = loop.run(30, 8, 0.0) + loop.run(30, 65_536, 0.0)
    assert len(set(before)) == 1
