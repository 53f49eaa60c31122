"""What a draft length yields is found by replaying requests, never by averaging over positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.comparison.truth import Truth, replay
from simulator.engine import EngineOptions, simulate
from simulator.peers.static import StaticPolicy
from simulator.workload import ClosedLoop, RequestPool, WorkloadPhase
from tests.unit.simulator.small import GAMMAS, pool, surface


def recorded(*requests, kinds=None):
    """A pool of these requests: each lists the drafts accepted from its positions on."""
    outputs = np.array([len(request) for request in requests], dtype=np.int64)
    accepted = np.concatenate([np.array(request, dtype=np.uint8) for request in requests])
    zeros = np.zeros_like(outputs)
    numbers = None if kinds is None else np.array(kinds, dtype=np.int64)
    return RequestPool(
        zeros + 10, outputs, np.cumsum(outputs) - outputs, zeros, {"mtp": accepted}, ("",), numbers
    )


def test_positions_within_an_accepted_draft_are_passed_over():
    """Gamma 3 starts at 0 and 3 alone; the mean over the positions would be 2/3."""
    replay_yields = replay(recorded([2, 0, 0, 2, 0, 0]), surface())
    assert replay_yields.steps.tolist() == [[6, 4, 2, 2]]
    assert replay_yields.expected.tolist() == [0, 0.5, 2, 2]


def test_drafts_beyond_the_end_of_an_output_do_not_count():
    replay_yields = replay(recorded([7, 7]), surface())
    assert replay_yields.expected.tolist() == [0, 1, 1, 1]


def test_kinds_are_told_apart_and_pooled_by_their_steps():
    replay_yields = replay(recorded([0, 0], [1, 0, 1, 0], [0, 0], kinds=[0, 2, 0]), surface())
    assert replay_yields.tokens.tolist() == [4, 0, 4]
    assert replay_yields.steps[:, 1].tolist() == [4, 0, 2]
    assert replay_yields.expected_by_kind[:, 1].tolist() == [0, 0, 1]
    assert replay_yields.expected[1] == pytest.approx(8 / 6 - 1)


def test_independent_draws_yield_what_their_curve_says():
    expected_yield = replay(pool(0.5, requests=2048), surface()).expected
    assert expected_yield[0] == 0
    assert expected_yield[1] == pytest.approx(0.5, abs=0.02)
    assert expected_yield[2] == pytest.approx(0.875, abs=0.04)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=6))
def test_a_replay_takes_the_steps_that_the_engine_takes(requests):
    one = recorded(*requests)
    loop = ClosedLoop((WorkloadPhase("all", one, 1, None),))
    steps = [
        simulate(loop, surface(), StaticPolicy(surface().arms, arm), EngineOptions(), 0).steps
        for arm in range(len(GAMMAS))
    ]
    assert steps == replay(one, surface()).steps[0].tolist()
    assert steps == one.steps_per_request("mtp", GAMMAS).sum(axis=1).tolist()


def test_kinds_of_several_pools_are_numbered_through_and_a_shared_pool_once():
    first, second = recorded([1, 0], [0, 0], kinds=[0, 1]), recorded([0, 0, 0])
    phases = [WorkloadPhase("", one, 1, 10) for one in (first, second, first)]
    expected_yield = Truth(ClosedLoop(tuple(phases)), surface()).expected_by_kind()
    assert expected_yield[:, 1].tolist() == [1, 0, 0]
