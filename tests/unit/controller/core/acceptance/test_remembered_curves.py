"""What a report and a batch size say for the remembered states, against the formulas."""

import math

import numpy as np
import pytest

from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.acceptance.traffic_state import (
    OCTAVES,
    RememberedCurves,
    TrafficState,
    octave_of,
    octaves_of,
    reference_acceptance,
)
from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings

SETTINGS = PlannerSettings()


def state(*means: float) -> TrafficState:
    estimator = AcceptanceEstimator(len(means), SETTINGS)
    estimator.warm_start_from(means, [100.0] * len(means))
    return TrafficState({"mtp": estimator}, SETTINGS)


def test_the_odds_are_those_of_successes_and_failures_by_position():
    known, current = state(0.8, 0.6), state(0.5, 0.5)
    curve, own = (each.estimators["mtp"].curve() for each in (known, current))
    wanted = 0.0
    # Of 6 sequences 2 were rejected at the first position, and 1 at the second.
    for k, (successes, failures) in enumerate([(4, 2), (3, 1)]):
        p, q = curve.conditional[k], own.conditional[k]
        n, m = curve.exposures[k], own.exposures[k] + own.prior_exposures[k]
        each = successes * math.log(p / q) + failures * math.log((1 - p) / (1 - q))
        wanted += n / (n + 8) * m / (m + 8) * each
    odds = RememberedCurves([known, current], SETTINGS).log_odds(
        "mtp", reference_acceptance(own, SETTINGS), (2, 1, 3)
    )
    assert odds[0] == pytest.approx(wanted)
    assert abs(odds[1]) < 0.2 * abs(odds[0])


def test_what_every_draft_of_no_sequence_reached_says_nothing():
    known, current = state(0.8, 0.6), state(0.8, 0.1)
    own = current.estimators["mtp"].curve()
    assert RememberedCurves([known], SETTINGS).log_odds(
        "mtp", reference_acceptance(own, SETTINGS), (4, 0, 0)
    ) == pytest.approx(
        RememberedCurves([known], SETTINGS).log_odds(
            "mtp", reference_acceptance(own, SETTINGS), (4, 0)
        )
    )


def test_states_give_the_tokens_of_any_list_of_arms_and_the_shares_of_octaves():
    known = state(0.8, 0.6)
    known.count_octave_visit(3)
    curves = RememberedCurves([known, state(0.5, 0.5)], SETTINGS)
    expected = known.estimators["mtp"].curve().expected_accepted
    for gammas in ((0, 1, 2), (2,), (0, 1, 2)):
        expected_tokens = curves.expected_accepted([Arm("mtp", gamma) for gamma in gammas])
        assert expected_tokens.shape == (2, len(gammas))
        assert expected_tokens[0].tolist() == [expected[gamma] for gamma in gammas]
    assert curves.octave_probabilities.shape == (OCTAVES, 2)
    assert curves.octave_probabilities.sum(axis=0) == pytest.approx([1.0, 1.0])
    assert curves.octave_probabilities[3, 0] > 5 * curves.octave_probabilities[2, 0]


def test_octaves_of_many_sizes_are_those_of_each():
    sizes = [1, 2, 3, 4, 5, 8, 9, 64, 65, 4096, 4097, 65_536]
    octaves = octaves_of(np.array(sizes, dtype=np.float64))
    assert octaves.tolist() == [octave_of(size) for size in sizes]
