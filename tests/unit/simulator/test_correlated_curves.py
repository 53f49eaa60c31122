"""A chain has the curve's acceptance on average, and the memory that it is given."""

import numpy as np
import pytest

from simulator.correlated_curves import AcceptanceMemory, CorrelatedCurves, calibrate_thresholds
from simulator.errors import InvalidInputError

CURVE = [0.75, 0.7, 0.68, 0.66, 0.66, 0.66]
LENGTHS = np.full(1500, 200, dtype=np.int64)


def drawn(memory, seed=0, curve=CURVE, drafters=("a",), lengths=LENGTHS, common=0.25):
    """Drafter -> [requests, positions]."""
    memories = dict.fromkeys(drafters, memory)
    chain = CorrelatedCurves("chain", dict.fromkeys(drafters, curve), memories, common)
    pool = chain.pool(np.random.default_rng(seed), len(lengths), lengths)
    return {name: values.reshape(len(lengths), -1) for name, values in pool.accepted.items()}


def correlation(x, y):
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


@pytest.mark.parametrize(
    "memory",
    [AcceptanceMemory(), AcceptanceMemory(0, 0, 1, 0, 1), AcceptanceMemory(1.0, 0.0, 1, 1.5, 30.0)],
)
@pytest.mark.parametrize("curve", [CURVE, [0.92, 0.93, 0.93, 0.92], [0.1] * 8])
def test_the_average_is_the_curve(memory, curve):
    accepted = drawn(memory, curve=curve)["a"]
    survival = [float((accepted >= k).mean()) for k in range(1, len(curve) + 1)]
    assert survival == pytest.approx(np.cumprod(curve), abs=0.03)


def test_a_token_is_as_easy_for_every_step_that_drafts_it():
    accepted = drawn(AcceptanceMemory())["a"].astype(int)
    before, after = accepted[:, :-1], accepted[:, 1:]
    assert (after >= before - 1).all()
    # Positions at which nothing is accepted end every draft that reaches them.
    flat = drawn(AcceptanceMemory(), curve=[0.7] * 64)["a"].astype(int)
    still = calibrate_thresholds((0.7,) * 64, AcceptanceMemory())
    assert (np.diff(still) <= 0.02).all()
    assert (flat[:, 1:] >= flat[:, :-1] - 1).mean() > 0.999


def test_neighbours_are_alike_as_far_as_the_memory_reaches():
    def at_distance(memory, distance):
        success = drawn(memory)["a"] > 0
        return correlation(success[:, :-distance], success[:, distance:])

    none = AcceptanceMemory(level_spread=0, passage_spread=0)
    assert abs(at_distance(none, 1)) < 0.02
    passages = AcceptanceMemory(level_spread=0, passage_spread=1, passage_tokens=10)
    assert at_distance(passages, 1) > 0.2
    assert at_distance(passages, 10) == pytest.approx(at_distance(passages, 1) / np.e, rel=0.35)
    assert abs(at_distance(passages, 80)) < 0.03
    levels = AcceptanceMemory(level_spread=1, passage_spread=0)
    assert at_distance(levels, 80) == pytest.approx(at_distance(levels, 1), rel=0.15)
    assert at_distance(levels, 80) > 0.2


def test_requests_drift():
    def between(memory, distance):
        level = (drawn(memory)["a"] > 0).mean(axis=1)
        return correlation(level[:-distance], level[distance:])

    steady = AcceptanceMemory(level_spread=0.5, drift_spread=0, passage_spread=0)
    assert abs(between(steady, 1)) < 0.1
    drifting = AcceptanceMemory(
        level_spread=0, drift_spread=0.5, drift_requests=30, passage_spread=0
    )
    assert between(drifting, 1) > 0.7
    assert between(drifting, 1) > between(drifting, 30) + 0.2


def test_drafters_agree_as_much_as_asked():
    def between(common):
        acceptance = drawn(AcceptanceMemory(), drafters=("a", "b"), common=common)
        return correlation(acceptance["a"] > 0, acceptance["b"] > 0)

    assert abs(between(0.0)) < 0.05
    assert 0.2 < between(0.5) < 0.6
    assert between(1.0) == pytest.approx(1.0)


def test_every_drafter_has_a_memory_of_its_own():
    memory = {
        "bursty": AcceptanceMemory(passage_spread=5.0, passage_tokens=10.0),
        "even": AcceptanceMemory(0, 0, 1, 0),
    }
    chain = CorrelatedCurves("chain", {"bursty": [0.5], "even": [0.5]}, memory)
    pool = chain.pool(np.random.default_rng(0), len(LENGTHS), LENGTHS)
    at_one = {
        name: correlation(values[:-1] > 0, values[1:] > 0) for name, values in pool.accepted.items()
    }
    assert at_one["bursty"] > 0.6
    assert abs(at_one["even"]) < 0.02


def test_requests_of_any_lengths_are_independent():
    lengths = np.array([8, 300, 1, 40, 300], dtype=np.int64)
    chain = CorrelatedCurves(
        "chain", {"a": CURVE}, {"a": AcceptanceMemory(level_spread=0, passage_tokens=1000.0)}
    )
    pools = [chain.pool(np.random.default_rng(s), 5, lengths).accepted["a"] for s in range(300)]
    success = np.array([values > 0 for values in pools], dtype=float)
    # The last position of the second request and the next request's first one.
    assert abs(correlation(success[:, 307], success[:, 308])) < 0.15
    assert correlation(success[:, 200], success[:, 203]) > 0.05


def test_extreme_curves_and_no_request():
    assert (drawn(AcceptanceMemory(), curve=[1.0, 1.0, 0.0])["a"] == 2).mean() > 0.98
    assert (drawn(AcceptanceMemory(), curve=[0.0, 0.5])["a"] == 0).all()
    empty = CorrelatedCurves("chain", {"a": CURVE}).pool(np.random.default_rng(0), 0)
    assert empty.requests == 0


@pytest.mark.parametrize(
    "bad",
    [{"level_spread": -1}, {"passage_tokens": 0}, {"passage_spread": 99}, {"drift_requests": 0}],
)
def test_a_memory_that_cannot_be_is_refused(bad):
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        AcceptanceMemory(**bad)


def test_a_chain_that_cannot_be_is_refused():
    with pytest.raises(InvalidInputError, match="no drafter is named"):
        CorrelatedCurves("chain", {})
    with pytest.raises(InvalidInputError, match=r"must be in \[0, 1\]"):
        CorrelatedCurves("chain", {"a": [1.5]})
    with pytest.raises(InvalidInputError, match="must be in"):
        CorrelatedCurves("chain", {"a": [0.5]}, output_tokens_mean=0)
    with pytest.raises(InvalidInputError, match="correlation: 2"):
        CorrelatedCurves("chain", {"a": [0.5]}, correlation=2)
