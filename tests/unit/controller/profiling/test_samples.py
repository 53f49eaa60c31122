import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.profiling.samples import remove_outliers, summarise


def noisy(count, seed=0, level=0.01, noise=0.02):
    return level * (1 + noise * np.random.default_rng(seed).standard_normal(count))


def test_a_step_in_a_hundred_that_takes_ten_times_as_long_is_left_out():
    seconds = noisy(400)
    seconds[::100] *= 10
    summary = summarise(seconds)
    assert summary.steps == 396
    assert summary.median == pytest.approx(0.01, rel=0.005)
    assert summary.spread == pytest.approx(1.349 * 0.02 * 0.01, rel=0.2)


def test_equal_steps_are_no_outliers_of_each_other():
    assert summarise([0.01] * 20).steps == 20
    # Nor is what is near: with no deviation at all, a share of the median still is allowed.
    assert summarise([0.01] * 20 + [0.0105]).steps == 21


def test_the_interval_of_the_median_narrows_with_the_root_of_the_steps():
    few, many = summarise(noisy(25)), summarise(noisy(2500))
    assert many.half_width < few.half_width / 5
    # Of normal noise: 1.96 * 1.2533 * sigma / sqrt(n).
    assert many.half_width == pytest.approx(1.96 * 1.2533 * 0.02 / 50, rel=0.3)


def test_the_interval_covers_the_truth_nineteen_times_in_twenty():
    summaries = [summarise(noisy(40, seed)) for seed in range(400)]
    covered = sum(abs(s.median / 0.01 - 1) <= s.half_width for s in summaries)
    assert 0.88 < covered / 400 < 0.99


@pytest.mark.parametrize("count", [1, 2, 5])
def test_too_few_steps_have_no_interval(count):
    summary = summarise(noisy(count))
    assert math.isinf(summary.half_width) or summary.half_width > 0.01
    assert summary.steps == count


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_the_median_of_what_is_kept_lies_within_what_was_measured(seconds):
    summary = summarise(seconds)
    assert min(seconds) <= summary.median <= max(seconds)
    assert summary.spread >= 0
    assert 1 <= summary.steps <= len(seconds)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50), st.floats(0.01, 100))
def test_what_is_an_outlier_does_not_depend_on_the_unit(seconds, factor):
    kept = len(remove_outliers(seconds))
    assert abs(len(remove_outliers([s * factor for s in seconds])) - kept) <= 1
