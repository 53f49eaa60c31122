"""The plan that a sidecar leaves behind, and constants that change under way."""

import dataclasses

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, Capabilities
from controller.core.plan import Reason, Regime, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.wire.explanations import explain
from tests.support.virtual_engine import VirtualEngine, engine_spec, make_engine

GOOD = [0.8] * 7


def probing(engine: VirtualEngine) -> None:
    """Runs until the plan holds a probe."""
    for _ in range(5000):
        engine.run(1, 8, GOOD)
        if any(row.probe for row in engine.core.current_plan().rows):
            return
    raise AssertionError("it never probes")


def test_the_last_plan_holds_the_choices_and_tries_nothing():
    engine = make_engine()
    probing(engine)
    before = engine.core.current_plan()
    last = engine.core.make_last_plan(30.0)
    assert last.lease_seconds == 30.0
    assert last.epoch > before.epoch
    assert [row.probe for row in last.rows] == [None] * len(before.rows)
    assert [(row.max_batch_size, row.arm) for row in last.rows] == [
        (row.max_batch_size, row.arm) for row in before.rows
    ]
    assert last.reason is Reason.LEASE
    assert "stopping" in last.reason_detail
    assert engine.core.current_plan() is last


def test_a_measured_engine_is_not_left_with_what_was_forced():
    engine = make_engine()
    engine.run(200, 8, GOOD)
    chosen = engine.core.current_plan().row_for(8).arm
    engine.core.force_arm(Arm("mtp", 0))
    last = engine.core.make_last_plan(30.0)
    assert last.row_for(8).arm == chosen
    assert chosen.gamma > 0
    assert {row.reason for row in last.rows} <= {Reason.EXPLOIT, Reason.HOLD}


def test_a_sleeping_drafter_sleeps_on():
    spec = dataclasses.replace(engine_spec(), capabilities=Capabilities(can_sleep=True))
    core = EngineController(spec, PlannerSettings(), None, VirtualClock())
    core.set_overrides([Override("off", Scope(ScopeKind.FLEET), Rule(off=True), "ann", "test")])
    assert all(row.drafter_asleep and not row.arm.gamma for row in core.make_last_plan(9.0).rows)


def trained(regime: Regime | None = None) -> EngineController:
    able = Capabilities(can_collect=True, can_take_versions=True)
    spec = dataclasses.replace(engine_spec(), capabilities=able)
    core = EngineController(spec, PlannerSettings(), None, VirtualClock())
    training = core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    training.state = TrainingState(collecting=True, version=7)
    if regime is not None:
        core.set_overrides([Override("r", Scope(ScopeKind.FLEET), Rule(regime=regime), "a", "b")])
    core.force_arm(None)
    return core


def test_nothing_is_learnt_that_nobody_would_see_and_the_version_stays():
    core = trained()
    assert core.current_plan().regime.mode is RegimeMode.COLLECT
    last = core.make_last_plan(30.0)
    assert last.regime == Regime()
    assert last.draft_version == 7


def test_the_regime_of_an_override_stays():
    pinned = Regime(RegimeMode.COLLECT)
    last = trained(pinned).make_last_plan(30.0)
    assert (last.regime, last.overrides) == (pinned, ("r",))


CHANGED = PlannerSettings(
    lease_seconds=2.0, shift_alarm=9.0, fast_exposures=40.0, cost_drift_max_profiled=3.0,
    probe_credit_max_seconds=0.01,
)  # fmt: skip


def test_other_constants_keep_what_was_learnt_and_chosen():
    engine = make_engine()
    engine.run(400, 8, GOOD)
    core = engine.core
    beliefs, plan, switches = (
        core.traffic.acceptance_snapshots(),
        core.current_plan(),
        core.switches,
    )
    drift, lost = core.cost_model.drift().tolist(), core.explorer.lost_seconds
    core.use_settings(CHANGED, TrainingSettings())
    assert core.traffic.acceptance_snapshots() == beliefs
    assert core.cost_model.drift().tolist() == drift
    assert (core.switches, core.explorer.lost_seconds) == (switches, lost)
    assert core.explorer.credit_seconds <= 0.01
    assert [row.arm for row in core.current_plan().rows] == [row.arm for row in plan.rows]
    engine.clock.advance(5)
    renewed = core.next_plan()
    assert renewed is not None
    assert renewed.epoch == plan.epoch + 1
    assert renewed.lease_seconds == 2.0


def test_after_a_change_the_core_decides_as_one_that_was_made_so():
    """Once nothing is chosen, both must go the same way."""
    settings = PlannerSettings(
        shift_z=2.0, shift_alarm=3.0, fast_exposures=10.0, slow_exposures=300.0, idle_steps=500.0,
        probe_share=0.02, switch_margin=0.05, prior_acceptance=0.5, cost_drift_max_profiled=1.2,
    )  # fmt: skip
    born, changed = make_engine(settings=settings, seed=3), make_engine(seed=3)
    born.core.use_settings(PlannerSettings(), TrainingSettings())
    for engine in (born, changed):
        engine.core.use_settings(settings, TrainingSettings())
        engine.core._planner.choice = None
        engine.core.force_arm(None)
        for batch_size, acceptance in ((8, 0.9), (48, 0.3), (8, 0.7)):
            engine.run(250, batch_size, [acceptance] * 7)
    assert changed.reports == born.reports


@pytest.mark.parametrize("policy", ["tide", "sglang-ema"])
def test_another_rule_takes_over(policy: str):
    engine = make_engine()
    engine.run(100, 8, GOOD)
    engine.core.use_settings(PlannerSettings(policy=policy), TrainingSettings())
    engine.run(200, 8, [0.02] * 7)
    assert explain(engine.core).policy == policy


def test_the_constants_of_training_change_too():
    core = trained()
    training = core.updates.training
    assert training is not None
    core.use_settings(PlannerSettings(), TrainingSettings(threshold=5))
    assert training.settings.threshold == 5
    assert training.state.version == 7
