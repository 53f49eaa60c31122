"""The memory that acceptance was drawn with is found again."""

import numpy as np
import pytest

from lab.papers.memory import correlation, fit
from simulator.acceptance_trace import RecordedRequest
from simulator.correlated_curves import AcceptanceMemory, CorrelatedCurves

LENGTHS = np.full(600, 300, dtype=np.int64)


def recorded(memory, common=0.25):
    chain = CorrelatedCurves("drawn", {"a": [0.7] * 16, "b": [0.4] * 16}, memory, common)
    pool = chain.pool(np.random.default_rng(3), len(LENGTHS), LENGTHS)
    rows = {name: values.reshape(len(LENGTHS), -1) for name, values in pool.accepted.items()}
    return [
        RecordedRequest("", 10, {name: values[i] for name, values in rows.items()})
        for i in range(len(LENGTHS))
    ]


@pytest.mark.parametrize(
    "memory",
    [
        AcceptanceMemory(0.5, 0, 1, 0.8, 3.0),
        AcceptanceMemory(0.2, 0, 1, 1.0, 15.0),
        AcceptanceMemory(2.0, 0, 1, 3.0, 5.0),
    ],
)
def test_a_memory_is_found_again(memory):
    fitted_memory = fit(recorded({"a": memory}), "a")
    assert fitted_memory.level_spread == pytest.approx(memory.level_spread, rel=0.2, abs=0.1)
    assert fitted_memory.passage_spread == pytest.approx(memory.passage_spread, rel=0.2)
    assert fitted_memory.passage_tokens == pytest.approx(memory.passage_tokens, rel=0.3)
    assert fitted_memory.survival[0] == pytest.approx(0.7, abs=0.03)
    assert fitted_memory.consistent > 0.98


def test_the_correlation_between_drafters_is_found_again():
    for common in (0.0, 0.3, 0.8):
        assert correlation(recorded({}, common), "a", "b") == pytest.approx(common, abs=0.06)
