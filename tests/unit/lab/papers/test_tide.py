"""Eq. 5 from Table 5, and what it says of when speculation pays."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from lab.papers.tide import (
    ALPHAS,
    GAMMA,
    acceptance_length,
    acceptance_rate,
    cost_ratio,
    reproduce_tide,
    speedup_point,
)
from simulator import published
from simulator.published import TIDE_MODELS

REPORT = reproduce_tide()


def thresholds(model):
    return {p.batch_size: p.threshold_length for p in REPORT.points if p.model == model}


@given(
    st.sampled_from(sorted(TIDE_MODELS)),
    st.integers(1, 128),
    st.integers(1, 8),
)
def test_eq_5_is_the_direct_ratio_of_tokens_per_second(name, batch, gamma):
    surface = published.published_surface(name, [gamma], max_batch_size=128, extrapolate=True)
    plain, deep = (surface.seconds[surface.arms.index(Arm("eagle3", g)), batch] for g in (0, gamma))
    point = speedup_point(name, TIDE_MODELS[name], batch, gamma)
    for alpha, speedup in zip(ALPHAS, point.speedups, strict=True):
        tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert speedup == pytest.approx((batch * tokens / deep) / (batch / plain), rel=1e-9)
    assert point.threshold_length == pytest.approx(
        point.draft_ratio * gamma + point.verify_ratio, rel=1e-12
    )


@given(st.floats(0, 0.999), st.integers(1, 12))
def test_the_acceptance_length_is_the_closed_form_of_equation_2(alpha, gamma):
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert acceptance_length(alpha, gamma) == pytest.approx(closed)


@given(st.floats(0.0, 1.0), st.integers(1, 16))
def test_the_rate_of_a_length_is_the_one_that_gives_it(alpha, gamma):
    length = acceptance_length(alpha, gamma)
    assert acceptance_rate(length, gamma) == pytest.approx(alpha, abs=1e-9)


def test_at_its_threshold_speculation_breaks_even():
    for point in REPORT.points:
        assert point.threshold_alpha is not None
        length = acceptance_length(point.threshold_alpha, GAMMA)
        ratio = cost_ratio(TIDE_MODELS[point.model], point.batch_size, GAMMA)
        assert length / ratio == pytest.approx(1.0, rel=1e-9)


def test_a_dense_model_needs_more_acceptance_the_larger_the_batch():
    llama = thresholds("tide-llama3.3-70b")
    late = [llama[b] for b in (16, 32, 64, 128)]
    assert all(a < b for a, b in itertools.pairwise(late))
    # At 128, four times the tokens take three times as long: hardly any drafter pays.
    assert llama[128] > 3


def test_gpt_oss_needs_the_most_at_its_largest_batch_and_the_least_at_1():
    gpt = thresholds("tide-gpt-oss-120b")
    assert min(gpt, key=lambda b: gpt[b]) == 1
    assert max(gpt, key=lambda b: gpt[b]) == 128


def test_once_most_experts_are_in_use_a_mixture_needs_less_acceptance_for_a_while():
    qwen = thresholds("tide-qwen3-235b")
    assert qwen[1] < qwen[2] < qwen[4] < qwen[8]
    assert qwen[8] > qwen[16] > qwen[32]


def test_table_4_has_speedups_as_the_text_states_them_but_for_one():
    speedups = [item.run.speedup for item in REPORT.measured]
    assert max(speedups) == pytest.approx(1.47, abs=0.005)
    below = [item.run for item in REPORT.measured if item.run.speedup < 1.265]
    assert [(run.batch_size, run.gamma) for run in below] == [(32, 2)]


def test_eq_5_promises_more_than_table_4_delivers_and_least_so_at_its_largest_batch():
    errors = {(item.run.batch_size, item.run.gamma): item.error for item in REPORT.measured}
    assert all(0 < error < 0.35 for error in errors.values())
    assert min(errors, key=lambda key: errors[key]) == (64, 3)
    # 2.82 tokens at (3 x 0.393 + 4.341) / 3.416 of a plain step, by hand.
    by_hand = (2.76 + 2.76 + 2.95) / 3 / ((3 * 0.393 + 4.341) / 3.416)
    assert errors[1, 3] == pytest.approx(by_hand / (342.20 / 246.62) - 1)


def test_both_measured_draft_lengths_agree_with_eq_5_in_order():
    for batch in {item.run.batch_size for item in REPORT.measured}:
        shallow, deep = (i for i in REPORT.measured if i.run.batch_size == batch)
        assert np.sign(deep.predicted - shallow.predicted) == np.sign(
            deep.run.speedup - shallow.run.speedup
        )
