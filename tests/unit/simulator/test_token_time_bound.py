"""Times per output token in the simulated engine under a bound: an H100, 64 sequences at once."""

from functools import cache

import pytest

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.wire.explanations import explain
from simulator import published
from simulator.cold_start import TRAFFIC_CURVES
from simulator.controller_policy import FINGERPRINT, ControllerPolicy
from simulator.curves import IndependentCurves
from simulator.engine import EngineOptions, RunResult, simulate
from simulator.peers.static import StaticPolicy
from simulator.policy import Policy
from simulator.sources import ClosedSource, PhaseSpec
from simulator.surface import profile_sizes

SURFACE = published.published_surface("h100-llama3.1-8b").with_drafters("eagle")
BATCH = SURFACE.max_batch_size
PROFILE = SURFACE.make_profile(FINGERPRINT, profile_sizes(BATCH))
TOLERANCE = 1.02


def run(kind: str, policy: Policy, batch: int = BATCH) -> RunResult:
    curve = [*TRAFFIC_CURVES[kind], *[TRAFFIC_CURVES[kind][-1]] * 8]
    phase = PhaseSpec("only", IndependentCurves(kind, {"eagle": curve}), batch, batch * 800)
    return simulate(ClosedSource((phase,))(0), SURFACE, policy, EngineOptions(), 0)


def tpot(result: RunResult) -> float:
    """Measured mean seconds between a sequence's output tokens."""
    return result.sequence_seconds / result.tokens


@cache
def statics(kind: str) -> list[RunResult]:
    """By draft length."""
    return [run(kind, StaticPolicy(SURFACE.arms, i)) for i in range(len(SURFACE.arms))]


def ours(bound: float, policy: str, tide_gamma: int = 8) -> ControllerPolicy:
    constants = PlannerSettings(policy=policy, tide_gamma=tide_gamma, tpot_ceiling_seconds=bound)
    return ControllerPolicy(SURFACE, PROFILE, BATCH, constants)


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_at_one_batch_size_the_fastest_arm_takes_the_least_time_per_token(kind: str):
    results = statics(kind)
    by_rate = sorted(results, key=lambda result: -result.tokens_per_second)
    assert by_rate == sorted(results, key=tpot)
    for result in results:
        assert tpot(result) * result.tokens_per_second == pytest.approx(BATCH, rel=0.01)


@pytest.mark.parametrize("kind", ["code", "prose"])
@pytest.mark.parametrize("policy", ["goodput", "tide", "sglang-ema"])
def test_a_bound_that_can_be_kept_is_kept_at_the_best_throughput_that_keeps_it(
    kind: str, policy: str
):
    lowest = min(tpot(result) for result in statics(kind))
    free = tpot(run(kind, ours(0.0, policy)))
    if policy == "goodput":
        # What it chooses has the lowest time anyway: the bound is tight, and costs nothing.
        bound = 1.01 * lowest
        assert free <= bound
    else:
        # The rule knows no times, so the bound has something to exclude.
        bound = (free + lowest) / 2
        assert free > TOLERANCE * bound
    result = run(kind, ours(bound, policy))
    best = max(static.tokens_per_second for static in statics(kind) if tpot(static) <= bound)
    assert tpot(result) <= TOLERANCE * bound
    assert result.tokens_per_second >= best / TOLERANCE


def test_what_the_bound_excludes_is_shown():
    policy = ours(0.007, "tide")
    run("code", policy)
    state = explain(policy.controller, BATCH).bound
    assert state is not None
    assert state.is_kept
    assert state.excluded is not None
    assert state.excluded.gamma == 8
    assert "bound of 7 ms a token excludes eagle gamma 8" in (
        policy.controller.force_arm(None).reason_detail
    )


@pytest.mark.parametrize("policy", ["goodput", "tide"])
def test_an_override_bounds_as_the_setting_does(policy: str):
    by_setting, by_override = ours(0.007, policy), ours(0.0, policy)
    rule = Rule(tpot_max_seconds=0.007)
    slow = Override("slow", Scope(ScopeKind.FLEET), rule, "ann", "because")
    by_override.controller.set_overrides([slow])
    results = [run("code", one) for one in (by_setting, by_override)]
    # The first step runs before the override is heard of.
    assert results[1].tokens_per_second == pytest.approx(results[0].tokens_per_second, rel=0.01)
    assert tpot(results[1]) <= TOLERANCE * 0.007
    state = explain(by_override.controller, BATCH).bound
    assert state is not None
    assert state.bound.override_id == "slow"


@pytest.mark.parametrize(("kind", "share"), [("code", 0.9), ("prose", 0.8)])
def test_a_bound_that_cannot_be_kept_runs_the_least_time_and_names_the_batch_that_can_keep_it(
    kind: str, share: float
):
    lowest = min(tpot(result) for result in statics(kind))
    bound = share * lowest
    policy = ours(bound, "goodput")
    result = run(kind, policy)
    assert tpot(result) <= TOLERANCE * lowest
    state = explain(policy.controller, BATCH).bound
    assert state is not None
    assert not state.attainable
    assert state.expected_seconds == pytest.approx(lowest, rel=0.03)
    assert 8 < state.kept_up_to < BATCH
    # In the engine, too, it is kept there, and in batches a quarter larger it is not.
    assert tpot(run(kind, ours(bound, "goodput"), state.kept_up_to)) <= TOLERANCE * bound
    larger = min(BATCH, round(1.25 * state.kept_up_to))
    assert tpot(run(kind, ours(bound, "goodput"), larger)) > bound
