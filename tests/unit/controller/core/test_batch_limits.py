"""Draft lengths that an engine has prepared for small batches are planned for no larger ones."""

import dataclasses
import random

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from controller.core.plan import Reason
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import POLICIES, PlannerSettings
from controller.wire.engines import engine_from_proto, engine_to_proto
from controller.wire.override_effects import preview_plan
from tests.support.virtual_engine import (
    GAMMAS,
    VirtualEngine,
    engine_spec,
    gpu_step_seconds,
    profile_of,
)

# 12 lies inside a bucket.
LIMITS = ((5, 12), (7, 4))


def limited(limits=LIMITS, **capabilities):
    spec = engine_spec()
    drafter = dataclasses.replace(spec.drafters[0], batch_limits=limits)
    return dataclasses.replace(spec, drafters=(drafter,), **capabilities)


def controller(policy="goodput", limits=LIMITS):
    spec = limited(limits)
    settings = PlannerSettings(policy=policy)
    return EngineController(spec, settings, profile_of(spec, gpu_step_seconds), VirtualClock())


def drive(limited_core):
    return VirtualEngine(limited_core, limited_core._clock, gpu_step_seconds, random.Random(0))


def allowed(plan, limits=LIMITS):
    by_gamma = dict(limits)
    return all(
        row.max_batch_size <= by_gamma.get(arm.gamma, 64)
        for row in plan.rows
        for arm in (row.arm, *([row.probe.arm] if row.probe else []))
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [2, 8, 40])
def test_no_plan_leaves_what_is_prepared(policy, batch_size):
    limited_core = controller(policy)
    engine = drive(limited_core)
    reasons = set()
    for acceptance in (0.97, 0.05, 0.9):
        for _ in range(30):
            engine.run(20, batch_size, [acceptance] * 7)
            plan = limited_core.current_plan()
            assert allowed(plan)
            reasons |= {row.reason for row in plan.rows}
    assert Reason.OVERRIDE not in reasons


def test_inside_the_limits_nothing_changes():
    free, bound = controller(limits=()), controller()
    rates = []
    for limited_core in (free, bound):
        engine = drive(limited_core)
        engine.run(600, 2, [0.95] * 7)
        rates.append(engine.tokens / engine.elapsed)
        assert limited_core.current_plan().row_for(2).arm == Arm("mtp", 7)
    assert rates[0] == rates[1]


def test_a_pin_to_what_is_not_prepared_gives_the_shortest_and_says_so():
    limited_core = controller()
    pin = Override("seven", Scope(ScopeKind.FLEET), Rule(gamma=7), author="a", reason="r")
    rows = preview_plan(limited_core, [pin])
    assert all(row.stuck == (row.max_batch_size > 4) for row in rows)
    assert any(row.stuck for row in rows)
    limited_core.set_overrides([pin])
    drive(limited_core).run(40, 16, [0.9] * 7)
    plan = limited_core.current_plan()
    assert plan.row_for(4).arm.gamma == 7
    assert plan.row_for(16).arm.gamma == 0
    assert "leave nothing that this engine can run" in plan.reason_detail


def test_an_override_that_counts_is_told_from_a_limit():
    limited_core = controller()
    engine = drive(limited_core)
    engine.run(200, 6, [0.97] * 7)
    assert limited_core.current_plan().row_for(6).arm.gamma == 5
    assert limited_core.current_plan().row_for(6).reason is not Reason.OVERRIDE
    most = Override("two", Scope(ScopeKind.FLEET), Rule(gamma_max=2), author="a", reason="r")
    limited_core.set_overrides([most])
    engine.run(40, 6, [0.97] * 7)
    assert limited_core.current_plan().row_for(6).arm.gamma == 2
    assert limited_core.current_plan().row_for(6).reason is Reason.OVERRIDE


def test_a_measurement_of_an_arm_leaves_larger_batches_alone():
    limited_core = controller()
    limited_core.force_arm(Arm("mtp", 7))
    plan = limited_core.current_plan()
    assert allowed(plan)
    assert plan.row_for(4).arm.gamma == 7
    assert plan.row_for(16).arm.gamma == 0


def test_the_limits_survive_the_wire():
    spec = limited()
    assert engine_from_proto(engine_to_proto(spec)) == spec


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (((4, 8),), "each must be one of"),
        (((7, 8), (7, 4)), "each must be one of"),
        (tuple((gamma, 8) for gamma in GAMMAS), "none could run in the largest batch"),
    ],
)
def test_limits_that_cannot_be(limits, message):
    with pytest.raises(InvalidEngineError, match=message):
        limited(limits)


def test_each_drafter_has_its_own():
    drafters = (
        DrafterSpec("mtp", DrafterKind.MTP, (0, 3), batch_limits=((0, 4),)),
        DrafterSpec("dflash", DrafterKind.DFLASH, (3, 7), batch_limits=((3, 8), (7, 8))),
    )
    spec = dataclasses.replace(engine_spec(), drafters=drafters)
    assert [arm for arm in spec.arms if spec.can_run(arm, 64)] == [Arm("mtp", 3)]
