"""The set of peers that every scenario runs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from simulator.peers import standard_peers
from simulator.peers.sglang_adaptive import PeerUnavailableError
from simulator.results import PolicyOrigin
from tests.unit.simulator.peers.loop import ARMS, Loop, profile_of, record

NAMES = {
    "sglang-adaptive",
    "vllm-schedule",
    "vllm-adaptive-k",
    "tide",
    "trtllm-gate",
    "hill-climber",
    "goodput-probe",
    "bandit-ucb",
}
TABLE = ((1, 1, 5), (2, 2, 3), (3, 4, 3), (5, 8, 0))
TWO = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 0), Arm("dflash", 8))


def fresh(factory):
    try:
        return factory()
    except PeerUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_peer_is_there_and_each_call_gives_a_fresh_one(name):
    peers = standard_peers(ARMS, profile_of(), TABLE)
    assert set(peers) == NAMES
    one, other = fresh(peers[name]), fresh(peers[name])
    assert one is not other
    assert one.origin in {PolicyOrigin.IMPORTED, PolicyOrigin.RESTATED}
    loop = Loop(one)
    assert Loop(other).run(50, 4, 0.6) == loop.run(50, 4, 0.6)


def test_without_costs_there_is_no_tide():
    assert set(standard_peers(ARMS, None, TABLE)) == NAMES - {"tide"}


def test_two_drafters_are_needed_to_choose_one_with_full_information_and_costs():
    assert set(standard_peers(TWO, profile_of(TWO), ((1, 8, 3),))) == NAMES | {"full-information"}
    assert set(standard_peers(TWO, None, ((1, 8, 3),))) == NAMES - {"tide"}


def test_peers_with_one_fixed_arm_take_the_tables_usual_one():
    peers = standard_peers(ARMS, profile_of(), TABLE)
    assert peers["tide"]().choose(1, 0.0).arm == 3


def test_the_gate_drafts_what_the_table_does_and_closes_below_what_pays():
    gate = standard_peers(ARMS, profile_of(), TABLE)["trtllm-gate"]()
    assert [gate.choose(b, 0.0).arm for b in (1, 2, 4, 5, 65_536)] == [5, 3, 3, 0, 0]
    without_costs = standard_peers(ARMS, None, TABLE)["trtllm-gate"]()
    # A fifth of the drafts pays at these costs; without them the threshold is 0.3.
    for policy, closed in ((gate, False), (without_costs, True)):
        for _ in range(500):
            policy.observe(record(1, ARMS, [8, 2]), 0.0)
        assert (policy.choose(1, 0.0).arm == 0) is closed


def test_a_gap_of_the_table_and_its_end_belong_to_the_range_below():
    gate = standard_peers(ARMS, profile_of(), ((33, 64, 1), (1, 4, 4)))["trtllm-gate"]()
    assert [gate.choose(b, 0.0).arm for b in (4, 5, 32, 33, 65, 65_536)] == [4, 4, 4, 1, 1, 1]


def test_a_table_that_never_speculates_leaves_them_their_usual_length():
    peers = standard_peers(ARMS, profile_of(), ((1, 1, 0),))
    assert ARMS[peers["tide"]().choose(1, 0.0).arm].gamma == 3
    assert peers["trtllm-gate"]().choose(1, 0.0).arm == 0


def test_of_two_drafters_the_tables_choice_is_the_fixed_one():
    peers = standard_peers(TWO, profile_of(TWO), ((1, 8, 3),))
    assert peers["tide"]().choose(1, 0.0).arm == 3
    assert peers["trtllm-gate"]().choose(64, 0.0).arm == 3
    assert peers["vllm-adaptive-k"]().choose(1, 0.0).arm == 3


@given(
    st.sets(st.sampled_from((0, 1, 2, 4, 8, 16)), min_size=1),
    st.sampled_from((("mtp",), ("mtp", "dflash"))),
    st.lists(st.integers(1, 65_536), min_size=1, max_size=5),
    st.integers(0, 3),
)
@settings(max_examples=25)
def test_every_peer_survives_any_arms_batches_and_lag(gammas, drafters, batches, lag):
    arms = tuple(Arm(d, g) for d in drafters for g in sorted(gammas))
    rng = random.Random(0)
    table = ((1, 4, rng.randrange(len(arms))), (5, 100, rng.randrange(len(arms))))
    for name, factory in standard_peers(arms, profile_of(arms), table).items():
        try:
            policy = factory()
        except PeerUnavailableError:
            assert name == "sglang-adaptive"
            continue
        loop = Loop(policy, arms=arms, lag=lag)
        for batch_size in batches:
            chosen = loop.run(8, batch_size, 0.5)
            assert all(0 <= arm < len(arms) for arm in chosen)
