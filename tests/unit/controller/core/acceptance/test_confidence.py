"""A drafter that says how sure it is gets believed as far as it has been right."""

import math
import random

import pytest

from controller.core.acceptance.confidence import ConfidenceCalibration
from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.settings import PlannerSettings


def logistic(x):
    return 1 / (1 + math.exp(-x))


def logit(p):
    return math.log(p / (1 - p))


def draw(rng, sequences, rates):
    counts = [0] * (len(rates) + 1)
    for _ in range(sequences):
        accepted = 0
        while accepted < len(rates) and rng.random() < rates[accepted]:
            accepted += 1
        counts[accepted] += 1
    return counts


@pytest.mark.parametrize("offset", [-2.0, -0.7, 0.0, 1.0])
def test_a_drafter_too_sure_or_too_shy_is_set_right(offset):
    rng, calibration = random.Random(0), ConfidenceCalibration(3)
    said = [0.8, 0.7, 0.6]
    truth = [logistic(logit(p) + offset) for p in said]
    for _ in range(400):
        calibration.fold(said, draw(rng, 8, truth))
    found = calibration.calibrated()
    assert found is not None
    assert found == pytest.approx(truth, abs=0.06)


def test_positions_behind_a_rejection_are_believed_with_the_same_correction():
    """Nothing ever reaches position 3; its confidence is there all the same."""
    rng, calibration = random.Random(1), ConfidenceCalibration(3)
    truth = [0.5, 0.0, 0.9]
    for _ in range(300):
        calibration.fold([0.5, 0.01, 0.9], draw(rng, 8, truth))
    found = calibration.calibrated()
    assert found is not None
    assert found[2] > 0.8


def test_a_few_steps_are_not_enough_and_silence_is_nothing():
    calibration = ConfidenceCalibration(2)
    assert calibration.calibrated() is None
    calibration.fold([0.9, 0.9], [0, 0, 4])
    assert calibration.calibrated() is None


def test_one_that_is_always_sure_and_never_right_ends_low():
    calibration = ConfidenceCalibration(2)
    for _ in range(500):
        calibration.fold([1.0, 1.0], [8, 0, 0])
    found = calibration.calibrated()
    assert found is not None
    # The correction is bounded, so the worst liar is not believed to be worse than that.
    assert 0 < found[0] < 0.85


def test_confidences_tell_of_positions_that_were_never_reached():
    """The same reports with and without confidences: only the first kind knows position 3."""
    settings, rng = PlannerSettings(), random.Random(2)
    truth = [0.9, 0.85, 0.3]
    with_, without = (AcceptanceEstimator(3, settings) for _ in range(2))
    for _ in range(200):
        # Drafts of two, but the drafter has said what it thinks of a third now and then.
        counts = draw(rng, 8, truth[:2])
        with_.fold(counts, truth[:2])
        without.fold(counts)
    for _ in range(6):
        counts = draw(rng, 1, truth)
        with_.fold(counts, truth)
        without.fold(counts)
    assert abs(with_.curve().conditional[2] - 0.3) < abs(without.curve().conditional[2] - 0.3)
