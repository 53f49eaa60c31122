"""The schedule by batch size, and the gate that closes once."""

import pytest

from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.trtllm_gate import SpeculationGate, break_even_rate
from tests.unit.simulator.peers.loop import ARMS, Loop, profile_of, record, step_seconds

ON, OFF = 3, 0
ALWAYS = ((1024, 3),)


@pytest.mark.parametrize(
    ("batch_size", "gamma"),
    [(1, 5), (4, 5), (5, 2), (16, 2), (17, 0), (32, 0), (33, 1), (64, 1), (65, 0), (65_536, 0)],
)
def test_a_batch_drafts_what_its_range_says_and_nothing_past_the_last_one(batch_size, gamma):
    policy = SpeculationGate(ARMS, ((64, 1), (4, 5), (32, 0), (16, 2)))
    assert ARMS[policy.choose(batch_size, 0.0).arm].gamma == gamma


def test_a_draft_length_that_the_drafter_lacks_is_the_nearest_one():
    arms = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 0), Arm("dflash", 8))
    policy = SpeculationGate(arms, ((4, 5), (16, 2), (32, 0)), drafter="dflash")
    assert [policy.choose(b, 0.0).arm for b in (1, 16, 17)] == [3, 3, 2]


def test_good_acceptance_keeps_it_open():
    loop = Loop(SpeculationGate(ARMS, ALWAYS, threshold=0.6))
    assert set(loop.run(1000, 16, 0.9)) == {ON}


def test_once_closed_it_never_comes_back():
    policy = SpeculationGate(ARMS, ALWAYS, window=50)
    loop = Loop(policy)
    loop.run(100, 16, 0.1)
    assert policy.is_closed
    assert set(loop.run(1000, 16, 0.95)) == {OFF}
    policy.observe(record(ON, ARMS, [0, 0, 0, 100]), 0.0)
    assert policy.choose(1, 0.0).arm == OFF


def test_it_does_not_judge_before_the_window_is_full():
    policy = SpeculationGate(ARMS, ALWAYS, window=3)
    for _ in range(2):
        policy.observe(record(ON, ARMS, [99, 0, 0, 0]), 0.0)
    assert not policy.is_closed
    policy.observe(record(ON, ARMS, [1, 0, 0, 0]), 0.0)
    assert policy.is_closed


@pytest.mark.parametrize(("accepted", "closed"), [(59, True), (60, False)])
def test_it_closes_below_the_threshold_and_not_at_it(accepted, closed):
    policy = SpeculationGate(ARMS, ALWAYS, threshold=0.2, window=1)
    policy.observe(record(ON, ARMS, [100 - accepted, accepted, 0, 0]), 0.0)
    assert policy.is_closed is closed


def test_a_step_is_one_sample_of_its_rate_whatever_its_batch_and_draft_length():
    """Rates 1, 0 and 0: a third.  Of all drafted tokens, 200 of 330 were accepted."""
    steps = ((2, [0, 0, 100]), (3, [40, 0, 0, 0]), (1, [10, 0]))
    for threshold, closed in ((0.33, False), (0.34, True)):
        policy = SpeculationGate(ARMS, ALWAYS, threshold=threshold, window=3)
        for arm, counts in steps:
            policy.observe(record(arm, ARMS, counts), 0.0)
        assert policy.is_closed is closed


def test_what_left_the_window_does_not_count():
    policy = SpeculationGate(ARMS, ALWAYS, threshold=0.4, window=2)
    for _ in range(10):
        policy.observe(record(ON, ARMS, [0, 0, 0, 50]), 0.0)
    policy.observe(record(ON, ARMS, [50, 0, 0, 0]), 0.0)
    assert not policy.is_closed
    policy.observe(record(ON, ARMS, [50, 0, 0, 0]), 0.0)
    assert policy.is_closed


def test_steps_without_drafts_are_no_samples():
    policy = SpeculationGate(ARMS, ((16, 3),), window=50)
    loop = Loop(policy)
    assert set(loop.run(100, 17, 0.0)) == {OFF}
    assert not policy.is_closed
    assert policy.choose(16, 0.0).arm == ON


@pytest.mark.parametrize("arms", [(Arm("mtp", 0),), (Arm("mtp", 5),)])
def test_without_a_choice_it_runs_what_there_is(arms):
    loop = Loop(SpeculationGate(arms, ((8, 3),), window=5), arms=arms)
    before = loop.run(30, 8, 0.0) + loop.run(30, 65_536, 0.0)
    assert set(before) == {0}


def test_without_plain_decoding_a_closed_gate_drafts_as_little_as_it_can():
    loop = Loop(SpeculationGate(ARMS[1:], ((8, 5),), window=5), arms=ARMS[1:])
    loop.run(20, 8, 0.0)
    assert set(loop.run(20, 8, 0.0)) == {0}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"schedule": ()}, "lists no batch size"),
        ({"schedule": ((0, 3),)}, "up to batch size 0"),
        ({"schedule": ((4, -1),)}, "draft -1"),
        ({"schedule": ((4, 3), (4, 1))}, "listed twice"),
        ({"threshold": 1.5}, r"the threshold 1.5 must be in \[0, 1\]"),
        ({"threshold": float("nan")}, r"the threshold nan must be in \[0, 1\]"),
        ({"window": 0}, "the window is 0 steps"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, fault):
    with pytest.raises(InvalidInputError, match=fault):
        SpeculationGate(ARMS, **{"schedule": ALWAYS, **wrong})


def rate_that_pays(gamma, batch_size):
    return (step_seconds(gamma, batch_size) / step_seconds(0, batch_size) - 1) / gamma


def test_the_rate_that_pays_is_the_least_at_which_any_range_breaks_even():
    schedule = ((4, 5), (64, 3), (1024, 0))
    expected = min(rate_that_pays(5, 1), rate_that_pays(5, 4), rate_that_pays(3, 16),
                   rate_that_pays(3, 64))  # fmt: skip
    assert break_even_rate(ARMS, schedule, profile_of()) == pytest.approx(expected)


def test_a_range_without_a_measured_size_is_priced_in_between():
    rate = break_even_rate(ARMS, ((4, 0), (12, 3), (1024, 0)), profile_of())
    ends = sorted((rate_that_pays(3, 4), rate_that_pays(3, 16)))
    assert ends[0] <= rate <= ends[1]


def test_a_schedule_that_never_drafts_has_no_rate_that_pays():
    assert break_even_rate(ARMS, ((1024, 0),), profile_of()) == 0.0
    assert break_even_rate(ARMS[1:], ALWAYS, profile_of()) == 0.0


def test_drafting_that_costs_nothing_always_pays():
    free = profile_of((Arm("mtp", 0), Arm("mtp", 3)), sizes=(1,))
    cells = tuple(
        type(cell)(cell.drafter, cell.gamma, 1, 0.01 - cell.gamma * 0.001, 0.0, 20)
        for cell in free.cells
    )
    cheaper = type(free)(free.fingerprint, free.drafters, 512.0, 0.0, cells)
    assert break_even_rate(ARMS[:1] + ARMS[3:4], ALWAYS, cheaper) == 0.0
