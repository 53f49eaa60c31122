import numpy as np
import pytest

from simulator.results import RequestTimes, summarise_seconds


def test_latencies_are_of_finished_requests_and_tpot_of_those_of_several_tokens():
    times = RequestTimes()
    for arrival, tokens in ((1.0, 4), (2.0, 1), (3.0, 9)):
        times.add(arrival, tokens)
    times.first_token[:2] = [1.5, 2.25]
    times.finish[:2] = [3.0, 2.25]
    latencies = times.finished_latencies()
    assert latencies.end_to_end.tolist() == [2.0, 0.25]
    assert latencies.per_token.tolist() == [0.5, 0.25]
    assert latencies.tpot.tolist() == [0.5]


def test_a_spread_is_mean_median_and_99th_percentile():
    summary = summarise_seconds(np.arange(101, dtype=np.float64))
    assert [summary.mean, summary.p50, summary.p99] == pytest.approx([50.0, 50.0, 99.0])
    assert np.isnan(summarise_seconds(np.array([])).p99)
