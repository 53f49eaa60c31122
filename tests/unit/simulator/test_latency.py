import numpy as np
import pytest

from simulator.results import RequestTimes, spread


def test_latencies_are_of_finished_requests_and_tpot_of_those_of_several_tokens():
    times = RequestTimes()
    for arrival, tokens in ((1.0, 4), (2.0, 1), (3.0, 9)):
        times.add(arrival, tokens)
    times.first_token[:2] = [1.5, 2.25]
    times.finish[:2] = [3.0, 2.25]
    found = times.finished()
    assert found.end_to_end.tolist() == [2.0, 0.25]
    assert found.per_token.tolist() == [0.5, 0.25]
    assert found.tpot.tolist() == [0.5]


def test_a_spread_is_mean_median_and_99th_percentile():
    found = spread(np.arange(101, dtype=np.float64))
    assert [found.mean, found.p50, found.p99] == pytest.approx([50.0, 50.0, 99.0])
    assert np.isnan(spread(np.array([])).p99)
