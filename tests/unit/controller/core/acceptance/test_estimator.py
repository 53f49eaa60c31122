"""The estimator sees the drafter, not the draft length that happened to run."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.settings import PlannerSettings
from tests.support.accepted_counts import accepted_counts

SETTINGS = PlannerSettings()


@pytest.mark.parametrize("gammas", [(7,), (3,), (1, 7), (2, 0, 5), (1, 2, 3, 5, 7)])
def test_the_estimate_does_not_depend_on_the_draft_lengths_that_ran(gammas):
    truth = [0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5]
    rng = random.Random(1)
    estimator = AcceptanceEstimator(7, SETTINGS)
    seen = []
    for i in range(3000):
        gamma = gammas[i % len(gammas)]
        estimator.observe(accepted_counts(rng, 8, gamma, truth))
        if i >= 1000:
            seen.append(estimator.curve().conditional)
    # On average over time: an occasional false alarm shortens the memory for a while.
    means = np.mean(seen, axis=0)
    for k in range(max(gammas)):
        assert means[k] == pytest.approx(truth[k], abs=0.05)


def test_a_fully_accepted_short_draft_is_not_taken_for_a_low_acceptance():
    # accepted / gamma_max would be 1/7 here; the only position seen was accepted every time.
    estimator = AcceptanceEstimator(7, SETTINGS)
    for _ in range(200):
        estimator.observe([0, 4])
    curve = estimator.curve()
    assert curve.conditional[0] > 0.97
    assert curve.exposures[1] == 0


def test_positions_never_seen_lean_on_those_before_them():
    estimator = AcceptanceEstimator(5, SETTINGS)
    for _ in range(300):
        estimator.observe([2, 2])
    means = estimator.curve().conditional
    assert means[1:] == pytest.approx([means[0]] * 4)


def test_a_position_that_was_hardly_seen_sets_neither_itself_nor_those_behind_it():
    estimator = AcceptanceEstimator(8, SETTINGS)
    for _ in range(300):
        estimator.observe([2, 1, 1, 6])
    before = estimator.curve().conditional
    # One sequence reached the fourth position, and its draft was rejected there.
    estimator.observe([0, 0, 0, 1, 0])
    after = estimator.curve().conditional
    assert after[3:] == pytest.approx(before[3:], abs=0.05)
    # Many of them do set it, and those behind it.
    for _ in range(300):
        estimator.observe([2, 1, 1, 4, 1])
    assert max(estimator.curve().conditional[3:]) < 0.35


def test_what_is_unknown_splits_into_what_positions_do_not_share():
    estimator = AcceptanceEstimator(8, SETTINGS)
    for _ in range(20):
        estimator.observe([1, 1, 2])
    curve = estimator.curve()
    slopes, parts = np.array(curve.component_slopes()), np.array(curve.component_variances())
    # Behind what was seen all positions are drawn to the same value: they are wrong together.
    alone = np.array(replace(curve, walk_exposures=0.0).component_slopes())
    assert slopes[8, 1] > 2 * alone[8, 1]
    # By Monte Carlo: a walk drawn with the parts' variances has the deviation that they say.
    rng = np.random.default_rng(1)
    drawn = np.array(curve.prior_exposures) / (
        np.array(curve.prior_exposures) + np.array(curve.exposures)
    )
    shares = []
    for _ in range(4000):
        apart, own = 0.0, 1e-2 * rng.normal(size=8) * np.sqrt(parts)
        walk = []
        for k in range(8):
            apart = own[k] + (drawn[k] * apart if k else 0.0)
            walk.append(curve.conditional[k] + apart)
        shares.append(np.log(1 + np.cumprod(walk).sum()))
    assert np.std(shares) == pytest.approx(1e-2 * np.sqrt(slopes[8] ** 2 @ parts), rel=0.06)


def test_what_goes_unobserved_keeps_its_mean_and_loses_its_confidence():
    estimator = AcceptanceEstimator(3, SETTINGS)
    for _ in range(300):
        estimator.observe([2, 1, 2, 3])
    before = estimator.curve()
    for _ in range(500):
        estimator.observe([8])
    after = estimator.curve()
    assert after.conditional == pytest.approx(before.conditional, abs=0.02)
    assert np.all(np.array(after.exposures) < np.array(before.exposures))
    assert np.all(np.array(after.variance()) > np.array(before.variance()))


def test_idle_evidence_fades_by_steps_and_not_by_how_many_sequences_passed_by():
    few, many = AcceptanceEstimator(2, SETTINGS), AcceptanceEstimator(2, SETTINGS)
    for estimator, batch in ((few, 1), (many, 200)):
        for _ in range(300):
            estimator.observe([2, 1, 1])
        for _ in range(100):
            estimator.observe([batch])
    assert few.curve().exposures == pytest.approx(many.curve().exposures)


def test_a_drafter_that_stands_by_keeps_its_means():
    estimator = AcceptanceEstimator(2, SETTINGS)
    for _ in range(100):
        estimator.observe([2, 1, 1])
    before = estimator.curve()
    for _ in range(400):
        estimator.observe_idle_step()
    after = estimator.curve()
    assert after.conditional == pytest.approx(before.conditional, abs=0.01)
    assert after.exposures[0] < before.exposures[0]
    # Shifted traffic is another matter: it may be good at that.
    estimator.discount_idle_evidence()
    assert max(estimator.curve().exposures) < 1
    prior = AcceptanceEstimator(2, SETTINGS).curve().conditional
    assert estimator.curve().conditional == pytest.approx(prior, abs=0.05)


def take(estimator, counts):
    """Folds a step, starts again after a shift, and returns whether there was one."""
    direction = estimator.observe(counts)
    if direction:
        estimator.reset_after_shift()
    estimator.commit()
    return direction != 0


@pytest.mark.parametrize(("batch", "steps"), [(1, 60), (16, 4), (256, 2)])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_a_large_change_is_noticed_soon(batch, steps, before, after):
    rng = random.Random(2)
    estimator = AcceptanceEstimator(5, SETTINGS)
    for _ in range(500):
        take(estimator, accepted_counts(rng, batch, 5, before))
    assert sum(take(estimator, accepted_counts(rng, batch, 5, after)) for _ in range(steps)) > 0
    for _ in range(20):
        take(estimator, accepted_counts(rng, batch, 5, after))
    assert estimator.curve().conditional[0] == pytest.approx(after, abs=0.3)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_still_traffic_raises_few_alarms(batch):
    rng = random.Random(3)
    estimator = AcceptanceEstimator(4, SETTINGS)
    alarms = sum(take(estimator, accepted_counts(rng, batch, 4, [0.6] * 4)) for _ in range(4000))
    assert alarms <= 12


def test_two_deep_drafts_are_enough_where_one_in_ten_was_accepted():
    rng = random.Random(4)
    estimator = AcceptanceEstimator(8, SETTINGS)
    for _ in range(300):
        estimator.observe(accepted_counts(rng, 1, 8, [0.1] * 8))
        estimator.commit()
    deep = [0] * 8 + [1]
    assert estimator.observe(deep) or estimator.observe(deep)


def test_after_a_shift_deep_positions_do_not_remember_the_old_traffic():
    rng = random.Random(5)
    estimator = AcceptanceEstimator(8, SETTINGS)
    for _ in range(300):
        take(estimator, accepted_counts(rng, 4, 8, [0.95] * 8))
    for _ in range(60):
        take(estimator, accepted_counts(rng, 4, 8, [0.4] * 8))
    assert max(estimator.curve().conditional) < 0.75


def test_a_class_leans_on_all_traffic_until_it_has_shown_its_own():
    everyone = AcceptanceEstimator(2, SETTINGS)
    mine = AcceptanceEstimator(2, SETTINGS)
    for _ in range(100):
        everyone.observe([2, 4, 10])
    parent = everyone.curve()
    assert mine.curve(parent).conditional == pytest.approx(parent.conditional)
    for _ in range(100):
        mine.observe([3, 1, 0])
        mine.commit(parent)
    assert mine.curve(parent).conditional[0] < 0.4
    assert everyone.curve().conditional[0] > 0.8


def test_what_would_have_been_accepted_is_evidence_as_far_as_the_step_shows_it():
    truth = [0.8, 0.6, 0.7]
    rng = random.Random(6)
    estimator = AcceptanceEstimator(3, SETTINGS)
    for _ in range(1500):
        exact, censored = [0] * 4, [0] * 3
        for _ in range(4):
            accepted = accepted_counts(rng, 1, 3, truth).index(1)
            # The step shows one, two or three tokens, whatever the proposal was.
            known = rng.randint(1, 3)
            if accepted < known:
                exact[accepted] += 1
            elif known == 3:
                exact[3] += 1
            else:
                censored[known] += 1
        estimator.observe_unused_proposals(exact, censored)
    curve = estimator.curve()
    assert curve.conditional == pytest.approx(truth, abs=0.06)
    assert curve.exposures[0] > curve.exposures[1] > curve.exposures[2] > 50


def test_answers_that_end_at_once_do_not_look_like_rejections():
    """Of three tokens, one by the prompt: 2 of 7 positions are shown, and estimated as they are."""
    truth = [0.8] * 7
    rng = random.Random(8)
    estimator, all_counted = AcceptanceEstimator(7, SETTINGS), AcceptanceEstimator(7, SETTINGS)
    for _ in range(600):
        exact, censored, counts = [0] * 8, [0] * 7, [0] * 8
        for _ in range(8):
            # Behind the end of an answer drafts are hardly accepted.
            accepted = accepted_counts(rng, 1, 7, truth[:2] + [0.1] * 5).index(1)
            counts[accepted] += 1
            if accepted >= 2:
                censored[2] += 1
            else:
                exact[accepted] += 1
        estimator.observe(exact, censored)
        all_counted.observe(counts)
    assert estimator.curve().conditional[:2] == pytest.approx(truth[:2], abs=0.05)
    assert estimator.curve().exposures[2:] == [0.0] * 5
    assert estimator.curve().conditional[2] > 0.7
    assert all_counted.curve().conditional[2] < 0.2


@given(st.lists(st.floats(0.05, 0.95), min_size=2, max_size=6), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_slopes_are_the_derivatives_of_the_log_of_the_tokens(acceptance, weight):
    estimator = AcceptanceEstimator(len(acceptance), SETTINGS)
    rng = random.Random(weight)
    for _ in range(30):
        estimator.observe(accepted_counts(rng, 8, len(acceptance), acceptance))
    curve = estimator.curve()

    def expected(conditional):
        return np.concatenate(([0.0], np.cumsum(np.cumprod(conditional))))

    assert curve.expected_accepted == pytest.approx(expected(curve.conditional))
    slopes = np.array(replace(curve, walk_exposures=0.0).component_slopes())
    for k in range(len(acceptance)):
        moved = np.array(curve.conditional)
        moved[k] += 1e-6
        ratio = (1 + expected(moved)) / (1 + expected(curve.conditional))
        assert slopes[:, k] == pytest.approx(np.log(ratio) / 1e-6, abs=1e-4)


@given(
    st.lists(
        st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), min_size=1, max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_any_history_gives_probabilities_and_a_growing_expectation(history):
    estimator = AcceptanceEstimator(8, SETTINGS)
    for counts in history:
        estimator.observe(counts)
    curve = estimator.curve()
    assert all(0 <= a <= 1 for a in curve.conditional)
    assert all(n >= 0 for n in curve.exposures)
    assert curve.expected_accepted[0] == 0
    assert all(a <= b for a, b in pairwise(curve.expected_accepted))
    assert np.all(np.array(curve.expected_accepted) <= np.arange(9))
    assert min(curve.variance()) >= 0
