"""The sections phases and arrivals: what runs when, and for how long."""

import numpy as np
import pytest

from simulator.engine import EngineOptions, simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from simulator.workload import ClosedLoop, OpenLoop, PhaseStart
from tests.unit.simulator.scenarios.minimal import file


def closed(**changes):
    loop = file(**changes).make_scenario().workload(0)
    assert isinstance(loop, ClosedLoop)
    return loop


def opened(workload_seed=0, **arrivals):
    changes = {"phases": ..., "arrivals": {"kind": "code"} | arrivals}
    loop = file(**changes).make_scenario().workload(workload_seed)
    assert isinstance(loop, OpenLoop)
    return loop


def test_phases_are_repeated_and_share_the_requests_of_their_kind():
    phases = [
        {"kind": "code", "batch": 4, "tokens": 100},
        {"kind": "prose", "batch": 8, "tokens": 50, "begins": "changed"},
    ]
    loop = closed(phases=phases, repeat=3)
    assert [p.name for p in loop.phases] == ["code x4", "prose x8"] * 3
    assert [p.tokens for p in loop.phases] == [400, 400] * 3
    assert [p.begins for p in loop.phases[:2]] == [PhaseStart.DRAINED, PhaseStart.CHANGED]
    assert loop.phases[0].pool is loop.phases[2].pool
    assert loop.phases[0].pool is not loop.phases[1].pool
    # Requests that change over are equally long in both kinds.
    first, second = loop.phases[0].pool, loop.phases[1].pool
    assert (first.output_tokens == second.output_tokens).all()


def test_another_context_means_other_requests():
    phases = [
        {"kind": "code", "batch": 2, "tokens": 10, "context_tokens_mean": 50_000},
        {"kind": "code", "batch": 2, "tokens": 10},
    ]
    long, short = (phase.pool for phase in closed(phases=phases).phases)
    assert long.context_tokens.mean() == pytest.approx(50_000, rel=0.15)
    assert short.context_tokens.mean() == pytest.approx(384, rel=0.15)


def test_steps_are_those_of_the_best_arm_by_truth():
    for kind, batch in (("code", 4), ("prose", 32)):
        scenario = file(phases=[{"kind": kind, "batch": batch, "steps": 500}]).make_scenario()
        workload, surface = scenario.workload(0), scenario.surface
        still = EngineOptions(noise=0.0)
        runs = [
            simulate(workload, surface, StaticPolicy(surface.arms, arm), still, 0)
            for arm in range(len(surface.arms))
        ]
        best = max(runs, key=lambda run: run.tokens_per_second)
        assert best.steps == pytest.approx(500, rel=0.03)
        assert len({run.steps for run in runs}) > 1


def test_poisson_arrivals_have_their_rates_and_are_the_same_for_all_seeds():
    rates = [
        {"seconds": 400, "requests_per_second": 1},
        {"seconds": 100, "requests_per_second": 10},
    ]
    loop = opened(rates=rates, repeat=2, seed=3, output_tokens_mean=20, window_seconds=50)
    times = loop.arrival_seconds
    assert loop.window_seconds == 50
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert (times < 400).sum() == pytest.approx(400, rel=0.15)
    assert ((times >= 400) & (times < 500)).sum() == pytest.approx(1000, rel=0.1)
    assert len(times) == pytest.approx(2800, rel=0.1)
    assert loop.pool.output_tokens.mean() == pytest.approx(20, rel=0.1)
    other = opened(1, rates=rates, repeat=2, seed=3, output_tokens_mean=20)
    assert (other.arrival_seconds == times).all()
    assert (other.pool.output_tokens == loop.pool.output_tokens).all()
    assert (other.pool.accepted["eagle"] != loop.pool.accepted["eagle"]).any()


def test_a_stretch_of_arrivals_may_have_a_kind_of_its_own():
    rates = [
        {"seconds": 100, "requests_per_second": 2},
        {"seconds": 100, "requests_per_second": 2, "kind": "prose"},
    ]
    loop = opened(rates=rates)
    # The first request comes at time 0, which is a little after the beginning of the first stretch.
    ends = np.cumsum(loop.pool.output_tokens)
    first = ends[(loop.arrival_seconds < 98).sum()]
    accepted = loop.pool.accepted["eagle"]
    assert (accepted[:first] > 0).mean() == pytest.approx(0.7, abs=0.03)
    assert (accepted[ends[(loop.arrival_seconds < 101).sum()] :] > 0).mean() == pytest.approx(
        0.3, abs=0.03
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"arrivals": {"kind": "code", "file": "a.csv"}}, "either phases or arrivals"),
        ({"phases": ...}, "either phases or arrivals"),
        ({"phases": ..., "arrivals": {"kind": "code"}}, "either file or rates"),
        ({"phases": ..., "repeat": 2, "arrivals": {"kind": "code", "file": "a.csv"}}, "repeat has"),
        ({"phases": ..., "arrivals": {"kind": "code", "file": "a.csv", "repeat": 2}}, "repeat has"),
        ({"phases": ..., "arrivals": {"kind": "news", "file": "a.csv"}}, "arrivals.kind: "),
        ({"phases": ..., "arrivals": {"kind": "code", "file": "no.csv"}}, "arrivals.file: "),
        ({"phases": ..., "arrivals": {"kind": "code", "speed": 2, "rates": [
            {"seconds": 1, "requests_per_second": 1}]}}, "speed has no meaning beside rates"),
        ({"phases": ..., "arrivals": {"kind": "code", "rates": [
            {"seconds": 1, "requests_per_second": 0}]}}, "no request arrives"),
        ({"phases": ..., "arrivals": {"kind": "code", "rates": [
            {"seconds": 1000, "requests_per_second": 99_999}]}}, "99999000 requests are more than"),
        ({"phases": ..., "arrivals": {"kind": "code", "repeat": 100_000, "rates": [
            {"seconds": 1000, "requests_per_second": 0}]}}, "100000000 seconds are more than"),
        ({"phases": ..., "arrivals": {"kind": "code", "rates": [
            {"seconds": 1, "requests_per_second": 1, "kind": "news"}]}}, "rates[0].kind: "),
        ({"phases": [{"kind": "code", "batch": 1, "tokens": 1}] * 2000, "repeat": 11},
         "repeat: 11 times 2000 phases are more than 20000"),
        ({"phases": [{"kind": "code", "batch": 1, "tokens": 1, "steps": 1}]},
         "phases[0]: either tokens or steps"),
        ({"phases": [{"kind": "old", "batch": 1, "tokens": 1},
                     {"kind": "code", "batch": 1, "tokens": 1, "begins": "changed"}],
          "traffic": {"code": {"geometric": {"eagle": 0.5}},
                      "old": {"geometric": {"eagle": 0.5}, "output_tokens_mean": 9}}},
         "phases[1].begins: running requests can change over only to a kind with the same"),
        ({"phases": [{"kind": "code", "batch": 1, "tokens": 1, "begins": "changed"},
                     {"kind": "old", "batch": 1, "tokens": 1}], "repeat": 2,
          "traffic": {"code": {"geometric": {"eagle": 0.5}},
                      "old": {"geometric": {"eagle": 0.5}, "output_tokens_mean": 9}}},
         "phases[0].begins: running requests can change over only to a kind with the same"),
    ],
)  # fmt: skip
def test_work_that_cannot_be_is_refused(changes, fault):
    with pytest.raises(InvalidInputError) as error:
        file(**changes).make_scenario()
    assert fault in str(error.value)
