"""SGLang's own class, unmodified, behind the policy."""

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.engine_spec import Arm
from simulator.peers.sglang_adaptive import (
    GRAPH_SIZES,
    PeerUnavailableError,
    SGLangAdaptive,
    available_config,
)
from simulator.results import PolicyOrigin
from tests.unit.simulator.peers.loop import ARMS, record

DEFAULT: dict[str, dict[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "up_hysteresis": 0.5},
    "8": {"candidate_steps": [0, 1, 3]},
    "64": {"candidate_steps": [0]},
}


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("sglang")
    from sglang.srt.speculative import adaptive_spec_params

    return adaptive_spec_params


def test_the_class_is_the_installed_packages_own(theirs):
    policy = SGLangAdaptive(ARMS)
    assert type(policy.params) is theirs.AdaptiveSpeculativeParams
    assert policy.origin is PolicyOrigin.IMPORTED


def test_every_step_is_what_calling_the_class_directly_gives(theirs):
    rng = random.Random(1)
    policy = SGLangAdaptive(ARMS)
    direct = theirs.AdaptiveSpeculativeParams(3)
    direct.set_cuda_graph_bs(list(GRAPH_SIZES))
    seen = set()
    for step in range(3000):
        batch_size = rng.choice((1, 3, 8, 20, 31, 40, 62, 64, 300))
        alpha = 0.95 if step % 1000 < 500 else 0.3
        arm = policy.choose(batch_size, 0.0).arm
        steps = direct.get_steps_for_batch(batch_size)
        assert ARMS[arm].gamma == steps
        seen.add((batch_size, steps))
        accepted = []
        for _ in range(batch_size):
            k = 0
            while k < steps and rng.random() < alpha:
                k += 1
            accepted.append(k)
        direct.on_verify_complete(accepted, batch_size)
        counts = [accepted.count(k) for k in range(steps + 1)]
        policy.observe(record(arm, ARMS, counts), 0.0)
    assert {(1, 1), (1, 7), (8, 0), (8, 3), (64, 0)} <= seen


def test_the_batch_sizes_are_those_that_sglang_captures_when_it_speculates(theirs):
    from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes

    arguments = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="EAGLE3")
    assert generate_decode_cuda_graph_batch_sizes(arguments, 256) == list(GRAPH_SIZES)


def test_a_batch_belongs_to_the_slot_of_the_size_that_it_is_padded_to(theirs):
    """The slots begin at 1, 8, 32 and 64, and start at the middle of their candidate steps or 3."""
    padded, plain = SGLangAdaptive(ARMS), SGLangAdaptive(ARMS, graph_sizes=())
    gammas = {
        size: (ARMS[padded.choose(size, 0.0).arm].gamma, ARMS[plain.choose(size, 0.0).arm].gamma)
        for size in (7, 8, 30, 31, 32, 60, 61, 63, 64, 300)
    }
    assert gammas == {
        7: (3, 3), 8: (3, 3), 30: (3, 3), 31: (1, 3), 32: (1, 1), 60: (1, 1), 61: (0, 1),
        63: (0, 1), 64: (0, 0), 300: (0, 0),
    }  # fmt: skip


def test_what_a_padded_batch_accepted_moves_the_slot_that_it_ran_in(theirs):
    policy = SGLangAdaptive(ARMS)
    ran = set()
    for _ in range(60):
        arm = policy.choose(31, 0.0).arm
        ran.add(ARMS[arm].gamma)
        policy.observe(record(arm, ARMS, [31] + [0] * ARMS[arm].gamma), 0.0)
    # The slot from 32 on has 0 and 1; that from 8 on, which has 3 as well, was not moved.
    assert ran == {0, 1}
    assert ARMS[policy.choose(30, 0.0).arm].gamma == 3


def test_candidates_without_an_arm_are_left_out():
    config = available_config(DEFAULT, (0, 1, 2, 3, 4))
    assert [e["candidate_steps"] for e in config.values()] == [[1, 3], [0, 1, 3], [0]]
    assert config["1"]["up_hysteresis"] == 0.5


@pytest.mark.parametrize(
    ("gammas", "steps"),
    [
        ((0, 4, 8), [[4, 8], [0, 4], [0]]),
        ((2,), [[2], [2], [2]]),
        ((0,), [[0], [0], [0]]),
        ((2, 4), [[2, 4], [2], [2]]),
    ],
)
def test_a_slot_that_would_lose_all_its_candidates_gets_the_nearest(gammas, steps):
    config = available_config(DEFAULT, gammas)
    assert [e["candidate_steps"] for e in config.values()] == steps


@pytest.mark.parametrize("gammas", [(0, 1, 2, 4, 8), (2,), (0,), (4, 16)])
def test_only_arms_that_exist_are_chosen(theirs, gammas):
    arms = tuple(Arm("mtp", g) for g in gammas)
    policy = SGLangAdaptive(arms)
    for batch_size in (1, 9, 65_536) * 60:
        arm = policy.choose(batch_size, 0.0).arm
        counts = [0] * (arms[arm].gamma + 1)
        counts[-1] = batch_size
        policy.observe(record(arm, arms, counts), 0.0)


def test_of_two_drafters_it_uses_the_first(theirs):
    arms = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 0), Arm("dflash", 7))
    policy = SGLangAdaptive(arms)
    assert {policy.choose(b, 0.0).arm for b in (1, 8, 100)} <= {0, 1}


def test_at_zero_steps_the_drafter_is_kept_in_step(theirs):
    assert SGLangAdaptive(ARMS).choose(64, 0.0).asleep is False
    assert SGLangAdaptive(ARMS, warm=False).choose(64, 0.0).asleep is True


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.adaptive_spec_params", None)
    with pytest.raises(PeerUnavailableError, match="pip install sglang") as caught:
        SGLangAdaptive(ARMS)
    assert caught.value.peer == "sglang-adaptive"


def test_the_peers_can_be_listed_without_importing_sglang():
    program = (
        "import sys, simulator.peers as peers\n"
        "from controller.core.engine_spec import Arm\n"
        "peers.standard_peers((Arm('mtp', 0),), None, ((1, 1, 0),))\n"
        "assert not {'sglang', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
