"""Steps that something else made slow or that were not timed right: none decides for long.

Steps cost what `gpu_step_seconds` says, times a factor that the sidecar does not know of.
"""

import math
import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.model import CostModel
from controller.core.plan import Reason
from controller.core.settings import PlannerSettings
from tests.support.virtual_engine import (
    GAMMAS,
    VirtualEngine,
    engine_spec,
    gpu_step_seconds,
    make_engine,
    profile_of,
)

CODE = (0.85, 0.83, 0.82, 0.8, 0.78, 0.76, 0.75)
JSON = (0.93, 0.92, 0.92, 0.91, 0.9, 0.9, 0.9)
# Of a step by its number and draft length.
Factor = Callable[[int, int], float]


def engine_with(factor: Factor, profile_error: float | None, seed: int = 0) -> VirtualEngine:
    engine = make_engine(profile_error, seed=seed)
    engine.seconds = lambda gamma, batch: (
        gpu_step_seconds(gamma, batch) * factor(engine.step, gamma)
    )
    return engine


def expected_tokens(gamma: int, acceptance: tuple[float, ...]) -> float:
    survival, expected = 1.0, 1.0
    for a in acceptance[:gamma]:
        survival *= a
        expected += survival
    return expected


def worth(gammas: list[int], batch_size: int, acceptance: tuple[float, ...]) -> float:
    """Tokens per second of these steps, if nothing had made them slow and by no luck."""
    tokens = sum(batch_size * expected_tokens(gamma, acceptance) for gamma in gammas)
    return tokens / sum(gpu_step_seconds(gamma, batch_size) for gamma in gammas)


def second_half(
    factor: Factor,
    profile_error: float | None,
    batch_size: int,
    acceptance: tuple[float, ...],
    steps: int = 300,
    seed: int = 0,
) -> float:
    engine = engine_with(factor, profile_error, seed)
    engine.run(steps, batch_size, acceptance)
    gammas = [arm.gamma for arm in engine.arms_run]
    return worth(gammas[steps // 2 :], batch_size, acceptance)


def never(step: int, gamma: int) -> float:
    return 1.0


def once(mistimed_step: int, factor: float) -> Factor:
    return lambda step, gamma: factor if step == mistimed_step else 1.0


def now_and_then(share: float, factor: float, seed: int) -> Factor:
    rng = random.Random(seed)
    return lambda step, gamma: factor if rng.random() < share else 1.0


PLACES = [(None, 1, CODE), (None, 64, JSON), (1.0, 1, CODE), (1.0, 64, JSON)]


@pytest.mark.parametrize(("profile_error", "batch_size", "acceptance"), PLACES)
def test_no_mistimed_step_at_the_start_switches_drafting_off(profile_error, batch_size, acceptance):
    undisturbed = second_half(never, profile_error, batch_size, acceptance)
    for step in range(6):
        share = second_half(once(step, 8.0), profile_error, batch_size, acceptance)
        assert share > 0.95 * undisturbed, f"step {step}"


@pytest.mark.parametrize(("profile_error", "batch_size", "acceptance"), PLACES)
def test_nor_does_one_that_is_too_fast(profile_error, batch_size, acceptance):
    undisturbed = second_half(never, profile_error, batch_size, acceptance)
    for step in range(1, 7):
        share = second_half(once(step, 1 / 16), profile_error, batch_size, acceptance)
        assert share > 0.95 * undisturbed, f"step {step}"


@pytest.mark.nightly
@pytest.mark.parametrize("profile_error", [None, 1.0])
@pytest.mark.parametrize("factor", [6.0, 20.0, 1 / 8])
def test_nor_does_one_of_any_size_at_any_batch(profile_error, factor):
    for batch_size, acceptance in product((1, 4, 16, 64), (CODE, JSON)):
        undisturbed = second_half(never, profile_error, batch_size, acceptance, 600)
        for step in range(6):
            wrong = once(step, factor)
            share = second_half(wrong, profile_error, batch_size, acceptance, 600)
            assert share > 0.95 * undisturbed, f"step {step} at {batch_size}"


# With the seeds 15, 22 and 31, drafting once ended permanently.
@pytest.mark.parametrize(
    ("profile_error", "batch_size", "acceptance"), [(None, 1, CODE), (None, 16, CODE), PLACES[3]]
)
def test_steps_that_are_mistimed_now_and_then_do_not_either(profile_error, batch_size, acceptance):
    for seed in (0, 15, 22, 31):
        undisturbed = second_half(never, profile_error, batch_size, acceptance, 300, seed)
        wrong = now_and_then(0.03, 8.0, seed)
        share = second_half(wrong, profile_error, batch_size, acceptance, 300, seed)
        assert share > 0.9 * undisturbed, f"seed {seed}"


@pytest.mark.parametrize("profile_error", [None, 1.0])
def test_what_drafting_cost_long_ago_is_measured_again_and_forgotten(profile_error):
    """Drafting takes 20 times as long for 60 steps, and then what it should."""
    slow = 60
    engine = engine_with(lambda step, gamma: 20.0 if gamma and step < slow else 1.0, profile_error)
    engine.run(slow + 100, 64, JSON)
    gammas = [arm.gamma for arm in engine.arms_run]
    assert not any(gammas[slow:])
    reasons_seen = set()
    while engine.step < 1000:
        engine.run(1, 64, JSON)
        plan = engine.core.current_plan()
        if plan.reason is Reason.PROBE:
            reasons_seen.add(plan.reason_detail.rpartition(" gamma ")[2][2:])
    assert "to measure again what it costs" in reasons_seen
    engine.run(500, 64, JSON)
    gammas = [arm.gamma for arm in engine.arms_run]
    best = max(worth([gamma], 64, JSON) for gamma in GAMMAS)
    assert worth(gammas[-200:], 64, JSON) > 0.95 * best


def test_drafting_that_stays_slow_is_hardly_measured_again():
    engine = engine_with(lambda step, gamma: 8.0 if gamma else 1.0, 1.0)
    engine.run(4000, 4, CODE)
    drafted = [step for step, arm in enumerate(engine.arms_run) if arm.gamma and step > 300]
    assert drafted
    assert len(drafted) <= 40


def cost_model(sizes: tuple[int, ...] = (1, 2, 4, 8), *, profiled: bool = True) -> CostModel:
    spec = engine_spec()
    profile = profile_of(spec, gpu_step_seconds) if profiled else None
    return CostModel(spec.arms, sizes, profile, PlannerSettings())


def observe(model: CostModel, arm: int, factor: float, batch_size: int = 2) -> None:
    seconds = factor * gpu_step_seconds(GAMMAS[arm], batch_size)
    expected = model.predict(arm, batch_size, 512 * batch_size)
    model.observe((arm, model.bucket_of(batch_size)), 512.0, expected, seconds)
    model.commit()


@pytest.mark.parametrize("factor", [1 / 50, 1 / 8, 3.0, 20.0])
@pytest.mark.parametrize("arm", [0, 3])
def test_one_far_step_of_a_new_cell_moves_nothing(arm, factor):
    model = cost_model()
    for _ in range(10):
        observe(model, 1, 1.0)
    before = model.costs(512.0).seconds.copy()
    doubt = model.uncertainty().relative_variance(1, 1)
    observe(model, arm, factor)
    assert model.costs(512.0).seconds == pytest.approx(before)
    assert model.uncertainty().relative_variance(1, 1) == pytest.approx(doubt)
    # The next one says that it was mistimed.
    observe(model, arm, 1.0)
    assert model.predict(arm, 2, 1024) == pytest.approx(gpu_step_seconds(GAMMAS[arm], 2), rel=0.02)
    assert model.rejected_steps == 1


def test_two_far_steps_count_as_far_as_they_agree():
    model = cost_model()
    for _ in range(10):
        observe(model, 0, 1.0)
    observe(model, 3, 20.0)
    observe(model, 3, 1.8)
    assert model.predict(3, 2, 1024) < 2.0 * gpu_step_seconds(GAMMAS[3], 2)
    assert model.predict(3, 2, 1024) > 1.4 * gpu_step_seconds(GAMMAS[3], 2)


@pytest.mark.parametrize(("arm", "steps"), [(3, 2), (1, 6)])
@pytest.mark.parametrize("factor", [1.8, 3.0])
def test_an_honest_change_is_learnt_as_soon_as_before(arm, steps, factor):
    """A cell that never ran shows it by its second step, a known one by its sixth."""
    model = cost_model()
    for _ in range(10):
        observe(model, 0, 1.0)
        observe(model, 1, 1.0)
    for _ in range(steps):
        observe(model, arm, factor)
    assert model.predict(arm, 2, 1024) > 0.8 * factor * gpu_step_seconds(GAMMAS[arm], 2)


SIZES = (1, 2, 4, 8, 16, 32, 64)


def wander(model: CostModel, rng: random.Random, steps: int, share: float, factor: float) -> None:
    """Steps of arms and batches at random, of which a share takes up to this factor more or less.

    Raises AssertionError as soon as the model holds what is no cost or no doubt.
    """
    arm, batch_size = 0, 1
    for _ in range(steps):
        if rng.random() < 0.2:
            arm = rng.randrange(len(GAMMAS))
        if rng.random() < 0.2:
            batch_size = rng.choice(SIZES)
        wrong = math.exp(rng.uniform(-1, 1) * math.log(factor)) if rng.random() < share else 1.0
        observe(model, arm, wrong * rng.lognormvariate(0, 0.05), batch_size)
    assert np.isfinite(model.drift()).all()
    assert (model.drift() > 0).all()
    covariance = model.uncertainty().covariance
    assert np.array_equal(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance)[0] > 0


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_costs_stay_numbers_and_come_back_after_many_mistimed_steps(profiled, seed):
    """Doubts once turned negative within a thousand such steps, and costs infinite soon after."""
    model, rng = cost_model(SIZES, profiled=profiled), random.Random(seed)
    wander(model, rng, 3000, 0.1, 8.0)
    wander(model, rng, 600, 0.0, 1.0)
    for arm, batch_size in product(range(len(GAMMAS)), SIZES):
        known = gpu_step_seconds(GAMMAS[arm], batch_size)
        assert known / 2 < model.predict(arm, batch_size, 512 * batch_size) < 2 * known


@given(
    profiled=st.booleans(),
    seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.03, 0.3, 1.0]),
    factor=st.sampled_from([8.0, 1e5]),
)
@settings(max_examples=8, deadline=None)
def test_no_step_times_make_a_cost_that_is_no_number(profiled, seed, share, factor):
    wander(cost_model(SIZES, profiled=profiled), random.Random(seed), 1000, share, factor)
