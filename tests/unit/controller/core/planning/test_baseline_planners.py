"""The other rules decide as their authors wrote them down."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.engine_spec import Arm
from controller.core.planning.baseline_planners import EmaPlanner, TidePlanner, make_planner
from controller.core.planning.planner import Planner, Values
from controller.core.settings import POLICIES, PlannerSettings
from controller.core.step_report import NO_FLAGS, StepReport
from controller.settings.settings import Settings
from controller.wire.explanations import explain
from simulator.peers.sglang_adaptive import PeerUnavailableError, SGLangAdaptive
from simulator.policy import StepRecord
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import make_engine

GAMMAS = (0, 1, 3, 5, 7)
ARMS = [Arm("mtp", g) for g in GAMMAS]


def values(expected, seconds):
    expected, seconds = np.asarray(expected, dtype=float), np.asarray(seconds, dtype=float)
    costs = Costs(seconds, np.zeros(seconds.shape, dtype=bool))
    expected = np.repeat(expected[:, None], seconds.shape[1], axis=1)
    value = (1 + expected) / seconds
    return Values(
        ARMS,
        TrafficCurves({}, {}, {}),
        expected,
        costs,
        np.zeros(len(expected)),
        CatchUpPrice(0, 0),
        value,
    )


@given(
    st.floats(0.0, 0.98),
    st.floats(0.001, 0.5),
    st.lists(st.floats(0.9, 8.0), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_tide_speculates_exactly_where_its_equation_5_says(alpha, c, betas):
    """Speedup = (1 - alpha^(gamma + 1)) / ((1 - alpha)(c gamma + beta(b))) > 1."""
    gamma, t0 = 3, 0.01
    expected = [sum(alpha**k for k in range(1, g + 1)) for g in GAMMAS]
    seconds = [[t0 if g == 0 else t0 * (c * g + beta) for beta in betas] for g in GAMMAS]
    planner = TidePlanner(ARMS, range(1, len(betas) + 1), PlannerSettings(policy="tide"))
    choice = planner.update(values(expected, seconds))
    for beta, arm in zip(betas, choice, strict=True):
        speedup = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (c * gamma + beta))
        if abs(speedup - 1) > 1e-9:
            assert GAMMAS[arm] == (gamma if speedup > 1 else 0)


def test_tide_takes_the_nearest_draft_length_that_there_is():
    arms = [Arm("mtp", g) for g in (0, 1, 7)]
    planner = TidePlanner(arms, (1,), PlannerSettings(policy="tide", tide_gamma=6))
    seconds = [[1.0], [1.1], [1.2]]
    assert planner.update(values([0, 0.8, 3.0], seconds)) == [2]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batches", [(1,), (1, 8, 31), (8, 32, 64), (2, 4, 16, 40, 100)])
def test_the_moving_average_goes_where_sglangs_own_class_goes(seed, batches):
    rng = random.Random(seed)
    try:
        peer = SGLangAdaptive(ARMS, graph_sizes=())
    except PeerUnavailableError as error:
        pytest.skip(str(error))
    buckets = tuple(range(1, 129))
    ours = EmaPlanner(ARMS, buckets, PlannerSettings(policy="sglang-ema"))
    nothing = values(np.zeros(len(ARMS)), np.ones((len(ARMS), len(buckets))))
    acceptance = rng.random()
    moved = set()
    for step in range(1, 600):
        if step % 90 == 0:
            acceptance = rng.random()
        batch = rng.choice(batches)
        arm = peer.choose(batch, 0.0).arm
        assert ours.update(nothing)[batch - 1] == arm
        gamma = GAMMAS[arm]
        moved.add(gamma)
        counts = accepted_counts(rng, batch, gamma, acceptance)
        ours.observe(StepReport(step, batch, 100, "mtp", gamma, tuple(counts), 0.01))
        peer.observe(record(batch, counts), 0.0)
    assert len(moved) > 1


def record(batch, counts):
    return StepRecord(0, batch, 100, 0, counts, 0.01, NO_FLAGS, 0)


def test_every_policy_that_can_be_set_can_be_made():
    kinds = {name: make_planner(ARMS, (1, 8), PlannerSettings(policy=name)) for name in POLICIES}
    assert type(kinds["goodput"]) is Planner
    assert len({type(kind) for kind in kinds.values()}) == len(POLICIES)
    with pytest.raises(ValueError, match="policy must be one of goodput, tide, sglang-ema"):
        PlannerSettings(policy="best")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_comes_from_the_environment_and_steers(policy, monkeypatch):
    monkeypatch.setenv("CONTROLLER_PLANNER__POLICY", policy)
    engine = make_engine(settings=Settings.load().planner)
    engine.run(600, 4, [0.8] * 8)
    assert {arm.gamma for arm in engine.arms_run[300:]} & {3, 5, 7}
    explanation = explain(engine.core)
    assert explanation.policy == policy
    if policy == "sglang-ema":
        assert explanation.probes == 0
