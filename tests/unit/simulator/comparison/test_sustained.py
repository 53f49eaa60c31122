"""The load that a policy sustains is the highest at which its latency stays within the bound."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.comparison.sustained import find_sustained_loads
from simulator.engine import EngineOptions, simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from tests.unit.simulator.small import arrivals, scenario

# Plain decoding takes some 5 ms a token when hardly anything runs, and drafting less.
BOUND = 0.006
ACCEPTANCE = 0.8


def p99(one, arm, speed):
    loop = one.workload(0)
    loop = replace(loop, arrival_seconds=loop.arrival_seconds / speed)
    run = simulate(loop, one.surface, StaticPolicy(one.surface.arms, arm), one.options, 0)
    return float(np.percentile(run.latencies.per_token, 99))


@pytest.fixture(scope="module")
def bounded():
    return arrivals(
        acceptance=ACCEPTANCE, sustained_tpot_p99_seconds=BOUND, options=EngineOptions(noise=0.0)
    )


@pytest.fixture(scope="module")
def loads(bounded):
    names = ["off", "static-3", "controller", "oracle", "vllm-schedule"]
    return find_sustained_loads(bounded, names, 0)


def test_a_little_more_than_the_sustained_load_is_too_much(bounded, loads):
    source = bounded.workload
    recorded = len(source.arrival_seconds) / source.arrival_seconds[-1]
    speed = loads["off"].requests_per_second / recorded
    assert p99(bounded, 0, speed) <= BOUND < p99(bounded, 0, speed * 1.05)
    tokens = source.output_tokens.sum() / source.arrival_seconds[-1]
    assert loads["off"].tokens_per_second == pytest.approx(speed * tokens)


def test_only_what_is_wanted_is_looked_for_and_the_oracle_sustains_the_most(loads):
    assert set(loads) == {"off", "static-3", "controller", "oracle", "vllm-schedule"}
    most = loads["oracle"].requests_per_second
    assert all(load.requests_per_second <= most * 1.01 for load in loads.values())
    assert loads["oracle"].requests_per_second > 1.05 * loads["off"].requests_per_second


def test_equal_seeds_find_equal_loads(bounded, loads):
    assert find_sustained_loads(bounded, ["controller"], 0)["controller"] == loads["controller"]


def test_a_bound_that_no_load_keeps_gives_none_and_one_that_all_keep_the_fastest():
    never = arrivals(sustained_tpot_p99_seconds=1e-4, requests=8)
    assert find_sustained_loads(never, ["off"], 0)["off"].requests_per_second == 0
    always = arrivals(sustained_tpot_p99_seconds=1e3, requests=8)
    assert find_sustained_loads(always, ["off"], 0)["off"].requests_per_second > 1000


def test_without_bound_or_arrivals_there_is_nothing_to_look_for():
    for one in (arrivals(), scenario(sustained_tpot_p99_seconds=0.01)):
        with pytest.raises(InvalidInputError, match="needs arrivals and a bound"):
            find_sustained_loads(one, ["off"], 0)
    at_once = arrivals(sustained_tpot_p99_seconds=0.01, requests=1)
    with pytest.raises(InvalidInputError, match="arrive at once"):
        find_sustained_loads(at_once, ["off"], 0)
