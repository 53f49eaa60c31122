"""The estimator sees the drafter, not the draft length that happened to run."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance import AcceptanceEstimator
from controller.core.settings import PlannerSettings

SETTINGS = PlannerSettings()


def draw(rng, batch, gamma, acceptance):
    counts = [0] * (gamma + 1)
    for _ in range(batch):
        accepted = 0
        while accepted < gamma and rng.random() < acceptance[accepted]:
            accepted += 1
        counts[accepted] += 1
    return counts


@pytest.mark.parametrize("gammas", [(7,), (3,), (1, 7), (2, 0, 5), (1, 2, 3, 5, 7)])
def test_the_estimate_does_not_depend_on_the_draft_lengths_that_ran(gammas):
    truth = [0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5]
    rng = random.Random(1)
    estimator = AcceptanceEstimator(7, SETTINGS)
    seen = []
    for i in range(3000):
        gamma = gammas[i % len(gammas)]
        estimator.fold(draw(rng, 8, gamma, truth))
        if i >= 1000:
            seen.append(estimator.conditional()[0])
    # On average over time: a false alarm now and then shortens the memory for a while.
    means = np.mean(seen, axis=0)
    for k in range(max(gammas)):
        assert means[k] == pytest.approx(truth[k], abs=0.05)


def test_a_fully_accepted_short_draft_is_not_taken_for_a_low_acceptance():
    # accepted / gamma_max would be 1/7 here; the only position seen was accepted every time.
    estimator = AcceptanceEstimator(7, SETTINGS)
    for _ in range(200):
        estimator.fold([0, 4])
    means, exposures = estimator.conditional()
    assert means[0] > 0.97
    assert exposures[1] == 0


def test_positions_never_seen_lean_on_those_before_them():
    estimator = AcceptanceEstimator(5, SETTINGS)
    for _ in range(300):
        estimator.fold([2, 2])
    means, _ = estimator.conditional()
    assert means[1:] == pytest.approx([means[0]] * 4)


def test_what_goes_unobserved_keeps_its_mean_and_loses_its_confidence():
    estimator = AcceptanceEstimator(3, SETTINGS)
    for _ in range(300):
        estimator.fold([2, 1, 2, 3])
    before, evidence_before = estimator.conditional()
    _, hope_before = estimator.expected_accepted()
    for _ in range(100):
        estimator.fold([8])
    after, evidence_after = estimator.conditional()
    _, hope_after = estimator.expected_accepted()
    assert after == pytest.approx(before, abs=0.02)
    assert np.all(evidence_after < evidence_before)
    assert hope_after[3] > hope_before[3]


def test_a_collapse_is_followed_within_a_few_steps_of_a_large_batch():
    rng = random.Random(2)
    estimator = AcceptanceEstimator(5, SETTINGS)
    for _ in range(500):
        estimator.fold(draw(rng, 16, 5, [0.9] * 5))
    for _ in range(12):
        estimator.fold(draw(rng, 16, 5, [0.05] * 5))
    assert estimator.conditional()[0][0] < 0.25
    assert estimator.shifts >= 1


@given(
    st.lists(
        st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), min_size=1, max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_any_history_gives_probabilities_and_a_growing_expectation(history):
    estimator = AcceptanceEstimator(8, SETTINGS)
    for counts in history:
        estimator.fold(counts)
    means, exposures = estimator.conditional()
    assert np.all((means >= 0) & (means <= 1))
    assert np.all(exposures >= 0)
    mean, optimistic = estimator.expected_accepted()
    assert mean[0] == optimistic[0] == 0
    assert all(a <= b for a, b in pairwise(mean))
    assert np.all(optimistic >= mean - 1e-12)
    assert np.all(mean <= np.arange(9))
