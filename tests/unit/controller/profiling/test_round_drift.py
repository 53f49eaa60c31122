import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.profiling.fit import remove_drift

LEVELS = {"off": 0.010, "three": 0.015, "seven": 0.024}


def measured(drift, steps=8, noise=0.0, levels=LEVELS):
    """Seconds and rounds of every arm; drift[r]: slowness of the machine in round r."""
    rng = np.random.default_rng(1)
    rounds = np.repeat(np.arange(len(drift)), steps)
    factors = np.repeat(np.asarray(drift), steps)
    seconds = {
        arm: level * factors * (1 + noise * rng.standard_normal(len(factors)))
        for arm, level in levels.items()
    }
    return seconds, {arm: rounds.tolist() for arm in levels}


def medians(steady):
    return {arm: float(np.median(values)) for arm, values in steady.items()}


def test_ratios_survive_a_machine_that_slows_down():
    seconds, rounds = measured([1.0, 1.2, 1.5, 1.9, 2.5], noise=0.02)
    # The dear arm was given up after the first two rounds: its raw median flatters it.
    seconds["seven"], rounds["seven"] = seconds["seven"][:16], rounds["seven"][:16]
    raw, steady = medians(seconds), medians(remove_drift(seconds, rounds))
    assert raw["seven"] / raw["off"] < 0.8 * 2.4
    assert steady["seven"] / steady["off"] == pytest.approx(2.4, rel=0.02)
    assert steady["three"] / steady["off"] == pytest.approx(1.5, rel=0.02)


def test_the_level_is_the_machines_usual_one():
    seconds, rounds = measured([1.0, 1.0, 3.0, 1.0, 1.0])
    assert medians(remove_drift(seconds, rounds)) == pytest.approx(LEVELS)


def test_a_disturbance_of_one_visit_is_not_taken_for_drift():
    seconds, rounds = measured([1.0] * 5)
    seconds["off"][8:16] *= 4
    steady = remove_drift(seconds, rounds)
    assert medians(steady) == pytest.approx(LEVELS)
    assert steady["three"] == pytest.approx(np.full(40, LEVELS["three"]))


@given(st.lists(st.floats(0.3, 3), min_size=1, max_size=8))
def test_whole_rounds_of_drift_leave_the_ratios_exact(drift):
    steady = medians(remove_drift(*measured(drift)))
    assert steady["seven"] / steady["off"] == pytest.approx(2.4)
    assert min(drift) * 0.999 <= steady["off"] / LEVELS["off"] <= max(drift) * 1.001


def test_one_arm_alone_and_none_at_all_are_no_special_case():
    assert remove_drift({}, {}) == {}
    alone = remove_drift({"off": np.array([0.01, 0.01])}, {"off": [0, 0]})
    assert alone["off"] == pytest.approx([0.01, 0.01])
    assert remove_drift({"off": np.array([])}, {"off": []}) == {}
