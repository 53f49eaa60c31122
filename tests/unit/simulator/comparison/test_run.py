"""Runs side by side: the oracle is one, ratios are paired, the production core is what runs."""

import numpy as np
import pytest

from controller.core.engine.engine_controller import EngineController
from simulator.comparison.contestants import static_names
from simulator.comparison.oracle import best_by_segment
from simulator.comparison.run import recovery_steps, run_all, run_seed
from simulator.comparison.summary import summarise
from simulator.comparison.truth import Truth
from simulator.controller_policy import ControllerPolicy
from simulator.engine import simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from simulator.results import PolicyOrigin
from tests.unit.simulator.small import arrivals, scenario, surface


@pytest.fixture(scope="module")
def moving():
    return run_seed(scenario(), 0)


def test_the_oracle_is_never_slower_than_any_static_arm(moving):
    oracle = moving.run("oracle")
    assert all(
        oracle.tokens_per_second >= run.tokens_per_second
        for run in moving.runs
        if run.origin is PolicyOrigin.STATIC
    )


def test_the_oracle_changes_its_arm_with_the_traffic():
    one = scenario()
    loop = one.workload(0)
    runs = [simulate(loop, one.surface, StaticPolicy(one.surface.arms, i), one.options, 0)
            for i in range(4)]  # fmt: skip
    best = best_by_segment(runs)
    assert one.surface.arms[best[0]].gamma > one.surface.arms[best[1]].gamma == 0


def test_the_controller_beats_every_static_arm_when_traffic_moves(moving):
    ours = moving.run("controller")
    assert ours.origin is PolicyOrigin.OURS
    assert all(
        ours.tokens_per_second > run.tokens_per_second
        for run in moving.runs
        if run.origin is PolicyOrigin.STATIC
    )


def test_the_production_core_is_what_is_simulated():
    policy = ControllerPolicy(surface(), None, 32)
    assert type(policy.controller) is EngineController


def test_all_policies_are_run_on_the_same_work(moving):
    tokens = [run.tokens for run in moving.runs]
    # A phase ends with the step that reaches its tokens: at most one step's more.
    assert max(tokens) - min(tokens) <= 4 * 8
    names = {run.name for run in moving.runs}
    assert {"off", "static-1", "oracle", "controller", "vllm-schedule", "tide"} <= names
    assert "sglang-adaptive" in names | set(moving.missing)


def test_recovery_counts_from_the_change():
    one = scenario(acceptance=(0.1, 0.9), tokens=400)
    loop = one.workload(0)
    never = simulate(loop, one.surface, StaticPolicy(one.surface.arms, 0), one.options, 0)
    at_once = simulate(loop, one.surface, StaticPolicy(one.surface.arms, 3), one.options, 0)
    truth = Truth(loop, one.surface)
    assert recovery_steps(loop, truth, at_once) == [0.0]
    steps = never.steps - never.trace.phase_starts[1][0]
    assert recovery_steps(loop, truth, never) == [float(steps)]


def test_side_by_side_and_one_after_the_other_find_the_same():
    both = [scenario(), scenario(acceptance=(0.5,))]
    alone = run_all(both, 0, ["controller"], processes=1)
    together = run_all(both, 0, ["controller"], processes=2)
    for mine, theirs in zip(alone, together, strict=True):
        assert [s.run("controller").seconds for s in mine] == [
            s.run("controller").seconds for s in theirs
        ]


def test_an_unknown_policy_is_refused_before_anything_runs():
    with pytest.raises(InvalidInputError, match="'absent' is unknown; there are bandit-ucb"):
        run_all([scenario()], 0, ["absent"])


def test_static_arms_are_named_by_what_they_do():
    assert list(static_names(surface())) == ["off", "static-1", "static-3", "static-7"]
    assert list(static_names(surface(("mtp", "dflash"))))[:2] == ["off", "static-mtp-1"]
    assert "static-dflash-7" in static_names(surface(("mtp", "dflash")))


def test_a_summary_pairs_seeds():
    one = scenario(seeds=3)
    seeds = run_all([one], 5, None, processes=1)[0]
    report = summarise(one, seeds)
    ours = report.policy("controller")
    logs = [
        np.log(s.run("controller").tokens_per_second / s.run("oracle").tokens_per_second)
        for s in seeds
    ]
    assert ours.ratio_to_oracle == pytest.approx(np.exp(np.mean(logs)))
    assert ours.ratio_to_oracle_ci is not None
    low, high = ours.ratio_to_oracle_ci
    assert low < ours.ratio_to_oracle < high
    assert report.policy("off").ratio_to_off == pytest.approx(1.0)
    assert ours.ratio_to_peers["tide"] > 1.0
    assert report.policies[0].tokens_per_second >= report.policies[-1].tokens_per_second


def test_only_wanted_policies_are_reported():
    one = scenario(seeds=1)
    report = summarise(one, run_all([one], 0, ["controller"], processes=1)[0], ["controller"])
    assert [p.name for p in report.policies] == ["controller"]
    assert report.policies[0].ratio_to_oracle_ci is None
    assert report.policies[0].ratio_to_off is not None
    assert report.policies[0].ratio_to_off > 1


def test_without_a_profile_the_peer_that_needs_one_is_left_out():
    names = {run.name for run in run_seed(scenario(profile=None), 0).runs}
    assert "tide" not in names
    assert "controller" in names


def test_an_open_loop_is_scored_by_latency_and_a_closed_one_by_tokens_per_second(moving):
    ours = moving.run("controller")
    assert ours.score == ours.tokens_per_second
    assert ours.latency is None
    one = arrivals(seeds=2)
    seeds = run_all([one], 0, ["controller", "static-7"], processes=1)[0]
    run = seeds[0].run("controller")
    assert run.latency is not None
    assert run.score == pytest.approx(1 / run.latency.per_token.mean)
    report = summarise(one, seeds)
    assert report.open_loop
    ours, fixed = report.policy("controller"), report.policy("static-7")
    assert ours.latency is not None
    assert fixed.latency is not None
    logs = [
        np.log(seed.run("controller").score / seed.run(report.best_static).score) for seed in seeds
    ]
    assert ours.ratio_to_best_static == pytest.approx(np.exp(np.mean(logs)))
    latencies = [seed.run("controller").latency for seed in seeds]
    means = [latency.end_to_end.p99 for latency in latencies if latency is not None]
    assert ours.latency.end_to_end.p99 == pytest.approx(np.mean(means))
    # Both keep up, so tokens over busy seconds hardly differ from load over time.
    assert fixed.ratio_to_oracle < 0.9


def test_probe_steps_are_counted_as_steps(moving):
    report = summarise(scenario(), [moving])
    ours, off = report.policy("controller"), report.policy("off")
    assert moving.run("controller").probe_steps > 0
    expected = moving.run("controller").probe_steps / moving.run("controller").steps
    assert ours.probe_step_share == pytest.approx(expected)
    assert off.probe_step_share == 0
