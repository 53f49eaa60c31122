"""The policy object that SGLang asks for a draft length."""

import logging

import pytest

from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang.adaptive_policy import SteeredPolicy
from engine_shim.sglang.api import hook_check


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> SteeredPolicy:
    monkeypatch.setattr(hook_check, "require_hooks", lambda *_: None)
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setenv("SPECULATION_GAMMAS", "0,2,4")
    return SteeredPolicy(initial_steps=2)


def choice(gamma: int, source: Source = Source.PLAN) -> StepChoice:
    return StepChoice(0, gamma, False, 1, 0, source, 0)


def test_candidates_come_from_the_one_setting(policy: SteeredPolicy) -> None:
    assert policy.candidate_steps == [0, 2, 4]


def test_without_a_decision_it_stays_at_the_startup_gamma(policy: SteeredPolicy) -> None:
    assert policy.choice.gamma == policy.get_steps_for_batch(8) == 2


def test_sglang_is_told_the_gamma_that_was_decided(policy: SteeredPolicy) -> None:
    for expected in (4, 0):
        policy.set_choice(choice(expected))
        assert policy.get_steps_for_batch(1) == policy.get_steps_for_batch(1) == expected


def test_verification_never_switches(policy: SteeredPolicy) -> None:
    assert policy.on_verify_complete([1, 2, 0], batch_size=3) is None


def test_every_gamma_may_run_at_every_batch_size(policy: SteeredPolicy) -> None:
    policy.set_cuda_graph_bs([1, 2, 4])
    assert policy.cuda_graph_bs_for_step(4) is None


def test_flying_alone_and_being_steered_again_are_logged_once_each(
    policy: SteeredPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [Source.PLAN, Source.PLAN, Source.GRACE, Source.GRACE, Source.SAFE_DEFAULT]
    with caplog.at_level(logging.INFO):
        for source in (*sources, Source.PLAN):
            policy.set_choice(choice(2, source))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.WARNING, logging.WARNING, logging.INFO]
    assert "grace" in caplog.records[1].message


def test_it_has_the_protocol_that_sglang_asks_for() -> None:
    needed = {
        "candidate_steps",
        "set_cuda_graph_bs",
        "get_steps_for_batch",
        "on_verify_complete",
        "cuda_graph_bs_for_step",
    }
    assert needed <= set(dir(SteeredPolicy))
