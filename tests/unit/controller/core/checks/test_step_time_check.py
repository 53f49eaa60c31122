"""Draft lengths that cost the same are noticed; those of honest engines differ enough."""

import random
from collections.abc import Callable

import pytest

from controller.core.checks.engine_checks import EngineChecks, WarningKind
from controller.core.engine_spec import DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import StepReport

MTP, DFLASH, STANDALONE, NGRAM = (
    DrafterKind.MTP, DrafterKind.DFLASH, DrafterKind.STANDALONE, DrafterKind.NGRAM,
)  # fmt: skip
GAMMAS = (0, 1, 3, 5)
Cost = Callable[[int, int], float]


def large_target(gamma: int, batch_size: int) -> float:
    """70B, a drafter of one layer: a pass takes 1.5 % of a step; verification is flat."""
    return 0.030 * (1 + 0.015 * gamma)


def compute_bound(gamma: int, batch_size: int) -> float:
    """Drafting is hidden, verification is not."""
    return 0.030 * (1 + 0.002 * batch_size * (gamma + 1))


def full_draft(gamma: int, batch_size: int) -> float:
    """Drafts five tokens whatever is asked for, and verification is flat."""
    return large_target(5, batch_size)


def block(gamma: int, batch_size: int) -> float:
    """One pass for every length but 0."""
    return 0.030 * (1.06 if gamma else 1.0)


def no_rest(gamma: int, batch_size: int) -> float:
    """Drafts the length that it is asked for, but one token at gamma = 0."""
    return large_target(max(gamma, 1), batch_size)


class TimedSteps:
    """Reports steps of a known cost.  noise: relative; slow: share of steps that take 8 times."""

    def __init__(self, kind: DrafterKind, cost: Cost, noise: float = 0.02, slow: float = 0.0):
        drafter = DrafterSpec("d", kind, GAMMAS)
        self.checks = EngineChecks(EngineSpec("e", Fingerprint("t"), (drafter,), 64))
        self.cost, self.noise, self.slow = cost, noise, slow
        self.random = random.Random(4)
        self.step = 0
        self.pace = 1.0

    def run(self, steps: int, gamma: int, batch_size: int = 1, context: int = 1000) -> None:
        for _ in range(steps):
            self.step += 1
            seconds = self.cost(gamma, batch_size) * self.pace
            seconds *= self.random.lognormvariate(0, self.noise)
            if self.random.random() < self.slow:
                seconds *= 8
            report = StepReport(
                self.step, batch_size, batch_size * context, "d", gamma,
                (batch_size, *[0] * gamma), seconds,
            )  # fmt: skip
            self.checks.observe_step_time(report, seconds)

    def take_turns(self, times: int, batch_size: int = 1, each: int = 1) -> None:
        for _ in range(times):
            for gamma in GAMMAS:
                self.run(each, gamma, batch_size)

    @property
    def flagged_arms(self) -> list[str]:
        return [it.found for it in self.checks.warnings()]


@pytest.mark.parametrize("each", [1, 8, 100])
@pytest.mark.parametrize("kind", [MTP, STANDALONE])
def test_an_engine_that_drafts_its_full_length_is_named(kind, each):
    engine = TimedSteps(kind, full_draft)
    engine.take_turns(6 + 200 // each, each=each)
    assert len(engine.flagged_arms) == 2
    assert "takes no longer at gamma 5 than at gamma 0" in engine.flagged_arms[0]
    assert "takes no longer at gamma 5 than at gamma 1" in engine.flagged_arms[1]
    assert {it.kind for it in engine.checks.warnings()} == {WarningKind.FLAT_STEP_TIME}


@pytest.mark.parametrize("each", [1, 4, 100])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("cost", [large_target, no_rest])
def test_an_engine_whose_drafts_cost_little_beside_a_flat_verification_is_not(cost, each, noise):
    engine = TimedSteps(MTP, cost, noise)
    for _ in range(8):
        engine.take_turns(1 + 100 // each, each=each)
        assert not engine.flagged_arms


def test_a_verification_that_costs_is_no_flat_step_time():
    engine = TimedSteps(MTP, compute_bound)
    engine.take_turns(300, batch_size=32)
    assert not engine.flagged_arms


def test_few_visits_of_gamma_0_are_enough_on_a_steady_machine():
    engine = TimedSteps(MTP, full_draft, noise=0.004)
    for _ in range(6):
        engine.run(300, 5)
        engine.run(8, 0)
    assert len(engine.flagged_arms) == 1
    honest = TimedSteps(MTP, large_target, noise=0.004)
    for _ in range(40):
        honest.run(300, 5)
        honest.run(8, 0)
        assert not honest.flagged_arms


def test_too_few_steps_say_nothing():
    engine = TimedSteps(MTP, full_draft)
    engine.take_turns(8)
    assert not engine.flagged_arms


def test_a_machine_that_slows_down_hides_no_difference_and_makes_none():
    for cost, warns in ((large_target, False), (full_draft, True)):
        engine = TimedSteps(MTP, cost, noise=0.005)
        for _ in range(100):
            # It slows down just as drafting stops.
            for gamma in (5, 0):
                engine.pace *= 1.0005
                engine.run(10, gamma)
        assert bool(engine.flagged_arms) is warns


@pytest.mark.parametrize("cost", [large_target, no_rest])
def test_a_machine_that_is_slow_for_a_while_again_and_again_makes_no_difference(cost):
    named = 0
    for seed in range(12):
        engine = TimedSteps(MTP, cost)
        engine.random, machine = random.Random(seed), random.Random(100 + seed)
        for step in range(3000):
            if machine.random() < 0.02:
                engine.pace = 2.3 - engine.pace  # 1 or 1.3
            engine.run(1, GAMMAS[step // 60 % len(GAMMAS)])
            if engine.flagged_arms:
                named += 1
                break
    assert named == 0


def test_another_context_or_batch_is_not_compared():
    engine = TimedSteps(MTP, full_draft)
    for _ in range(300):
        engine.run(1, 0, batch_size=4, context=100)
        engine.run(1, 5, batch_size=4, context=4000)
        engine.run(1, 3, batch_size=5, context=4000)
    assert not engine.flagged_arms


def test_outliers_do_not_hide_it():
    engine = TimedSteps(MTP, full_draft, noise=0.01, slow=0.02)
    engine.take_turns(600)
    assert engine.flagged_arms


def test_a_block_drafter_is_flat_above_0_and_named_only_if_0_is_no_quicker():
    honest = TimedSteps(DFLASH, block)
    honest.take_turns(200)
    assert not honest.flagged_arms
    engine = TimedSteps(DFLASH, lambda gamma, size: block(1, size))
    engine.take_turns(200)
    assert len(engine.flagged_arms) == 1
    assert "gamma 0" in engine.flagged_arms[0]


def test_a_lookup_costs_nothing_and_is_not_compared():
    engine = TimedSteps(NGRAM, lambda gamma, size: 0.03)
    engine.take_turns(300)
    assert not engine.flagged_arms


def test_what_is_kept_of_an_engine_with_many_lengths_and_batch_sizes_is_bounded():
    drafters = tuple(DrafterSpec(name, MTP, tuple(range(65))) for name in "ab")
    checks = EngineChecks(EngineSpec("e", Fingerprint("t"), drafters, 65536))
    step = 0
    for size in [1 << octave for octave in range(17)]:
        for gamma in [gamma for gamma in range(65) for _ in range(4)]:
            for name in "ab":
                step += 1
                counts = (size, *[0] * gamma)
                checks.observe_step_time(
                    StepReport(step, size, size, name, gamma, counts, 0.01), 0.01
                )
    times = checks._step_time_check
    assert len(times._differences) <= 2048
    assert max(map(len, times._recent_means.values())) <= 16


def test_the_warning_ends_when_the_lengths_differ():
    engine = TimedSteps(MTP, full_draft)
    engine.take_turns(300)
    assert engine.flagged_arms
    engine.cost = large_target
    engine.take_turns(300)
    assert not engine.flagged_arms
