"""What a report and a batch size say for the remembered states, against the formulas."""

import math

import numpy as np
import pytest

from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.acceptance.traffic_state import (
    OCTAVES,
    RememberedCurves,
    TrafficState,
    believed,
    octave_of,
    octaves_of,
)
from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings


def state(*means: float) -> TrafficState:
    estimator = AcceptanceEstimator(len(means), PlannerSettings())
    estimator.begin_from(means, [100.0] * len(means))
    return TrafficState({"mtp": estimator})


def test_the_odds_are_those_of_successes_and_failures_by_position():
    known, current = state(0.8, 0.6), state(0.5, 0.5)
    curve, own = (each.drafters["mtp"].curve() for each in (known, current))
    wanted = 0.0
    # Of 6 sequences 2 were rejected at the first position, and 1 at the second.
    for k, (successes, failures) in enumerate([(4, 2), (3, 1)]):
        p, q = curve.conditional[k], own.conditional[k]
        n, m = curve.exposures[k], own.exposures[k] + own.prior_exposures[k]
        each = successes * math.log(p / q) + failures * math.log((1 - p) / (1 - q))
        wanted += n / (n + 8) * m / (m + 8) * each
    found = RememberedCurves([known, current]).log_odds("mtp", believed(own), (2, 1, 3))
    assert found[0] == pytest.approx(wanted)
    assert abs(found[1]) < 0.2 * abs(found[0])


def test_what_every_draft_of_no_sequence_reached_says_nothing():
    known, current = state(0.8, 0.6), state(0.8, 0.1)
    own = current.drafters["mtp"].curve()
    assert RememberedCurves([known]).log_odds("mtp", believed(own), (4, 0, 0)) == pytest.approx(
        RememberedCurves([known]).log_odds("mtp", believed(own), (4, 0))
    )


def test_states_give_the_tokens_of_any_list_of_arms_and_the_shares_of_octaves():
    known = state(0.8, 0.6)
    known.enter(3)
    curves = RememberedCurves([known, state(0.5, 0.5)])
    expected = known.drafters["mtp"].curve().expected
    for gammas in ((0, 1, 2), (2,), (0, 1, 2)):
        found = curves.expected([Arm("mtp", gamma) for gamma in gammas])
        assert found.shape == (2, len(gammas))
        assert found[0].tolist() == [expected[gamma] for gamma in gammas]
    assert curves.octaves.shape == (OCTAVES, 2)
    assert curves.octaves.sum(axis=0) == pytest.approx([1.0, 1.0])
    assert curves.octaves[3, 0] > 5 * curves.octaves[2, 0]


def test_octaves_of_many_sizes_are_those_of_each():
    sizes = [1, 2, 3, 4, 5, 8, 9, 64, 65, 4096, 4097, 65_536]
    found = octaves_of(np.array(sizes, dtype=np.float64))
    assert found.tolist() == [octave_of(size) for size in sizes]
