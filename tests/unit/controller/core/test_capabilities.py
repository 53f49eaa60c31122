"""What an engine has lost is neither planned nor probed again, and every answer says why."""

import dataclasses
import random

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import (
    Arm,
    Capabilities,
    Capability,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    LostCapability,
)
from controller.core.errors import InvalidLossError, UnknownArmError
from controller.core.model_shapes import DrafterKind
from controller.core.plan import Reason, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import POLICIES, PlannerSettings
from controller.wire.explanations import explain
from controller.wire.override_effects import preview_plan
from tests.support.virtual_engine import VirtualEngine

GAMMAS = (0, 1, 3, 7)
ABLE = Capabilities(
    can_sleep=True,
    can_switch_drafter=True,
    can_update_online=True,
    can_collect=True,
    can_take_versions=True,
    drafters_follow=True,
)
DFLASH = LostCapability(Capability.DRAFTER, "dflash", reason="MemoryError: no room", lost_at=1e9)


def spec(lost=(), own=GAMMAS):
    drafters = (
        DrafterSpec("eagle3", DrafterKind.MTP, own),
        DrafterSpec("dflash", DrafterKind.DFLASH, GAMMAS[1:]),
    )
    return EngineSpec("e", Fingerprint("target"), drafters, 16, ABLE, lost=lost)


class BreakingEngine(VirtualEngine):
    """Accepts whatever DFlash drafts, and little of what EAGLE does.

    broken: it runs EAGLE wherever DFlash is planned, as an engine does whose second drafter fails.
    """

    def __init__(self, lost=(), own=GAMMAS, **settings):
        clock = VirtualClock()
        core = EngineController(spec(lost, own), PlannerSettings(**settings), None, clock)
        super().__init__(
            core, clock, lambda gamma, _: 0.02 + 0.001 * gamma, random.Random(1), 0.0, context=100
        )
        self.broken = False
        self.planned = []

    def run(self, steps, batch_size=4, acceptance=0.0):
        self.core.next_plan()
        super().run(steps, batch_size, acceptance)

    def decode(self, arm, batch_size, acceptance):
        row = self.plan.row_for(batch_size)
        self.planned += [row.arm, *([row.probe.arm] if row.probe else [])]
        if self.broken and arm.drafter == "dflash":
            arm = Arm("eagle3", arm.gamma)
        return super().decode(arm, batch_size, 0.95 if arm.drafter == "dflash" else 0.3)

    def plans(self, steps, batch_size=4):
        """Drafters that the next steps' plans ask for."""
        self.planned = []
        self.run(steps, batch_size)
        return {arm.drafter for arm in self.planned if arm.gamma}


def override(rule, name="pin"):
    return Override(name, Scope(ScopeKind.FLEET), rule, "ann", "because")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_drafter_is_never_planned_or_probed_again(policy):
    engine = BreakingEngine(policy=policy)
    engine.run(300)
    engine.broken = True
    assert engine.core.record_lost_capabilities([DFLASH]) == (DFLASH,)
    assert engine.plans(3000) <= {"eagle3"}


def test_the_lost_drafter_had_been_the_choice():
    engine = BreakingEngine()
    engine.run(600)
    assert engine.core.current_plan().row_for(4).arm.drafter == "dflash"
    engine.core.record_lost_capabilities([DFLASH])
    # Not after a pause or at the half of a lease: at once.
    plan = engine.core.next_plan()
    assert plan is not None
    assert {row.arm.drafter for row in plan.rows if row.arm.gamma} <= {"eagle3"}
    assert "lost: drafter dflash" in plan.reason_detail


def test_an_engine_that_introduces_itself_without_it_is_never_told_to_run_it():
    engine = BreakingEngine(lost=(DFLASH,))
    assert engine.plans(600) <= {"eagle3"}


def test_single_draft_lengths_can_be_lost():
    engine = BreakingEngine()
    engine.run(300)
    engine.core.record_lost_capabilities([dataclasses.replace(DFLASH, gammas=(7,))])
    engine.planned = []
    engine.run(1500)
    assert Arm("dflash", 7) not in engine.planned
    assert Arm("dflash", 3) in engine.planned


def test_what_is_repeated_changes_nothing():
    engine = BreakingEngine()
    engine.run(50)
    part = dataclasses.replace(DFLASH, gammas=(3,))
    assert engine.core.record_lost_capabilities([part, DFLASH, DFLASH]) == (part, DFLASH)
    epoch = engine.core.current_plan().epoch
    assert (
        engine.core.record_lost_capabilities([dataclasses.replace(DFLASH, reason="again"), part])
        == ()
    )
    assert engine.core.spec.lost == (part, DFLASH)
    assert engine.core.current_plan().epoch == epoch


@pytest.mark.parametrize(
    "loss",
    [
        LostCapability(Capability.DRAFTER, "ngram"),
        LostCapability(Capability.DRAFTER, "dflash", (2,)),
    ],
)
def test_what_the_engine_never_had_cannot_be_lost(loss):
    engine = BreakingEngine()
    with pytest.raises(InvalidLossError, match="this engine introduced"):
        engine.core.record_lost_capabilities([DFLASH, loss])
    assert engine.core.spec.lost == ()
    with pytest.raises(InvalidLossError, match="this engine introduced"):
        spec((loss,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"capability": Capability.DRAFTER},
        {"capability": Capability.SLEEP, "drafter": "dflash"},
        {"capability": Capability.SLEEP, "gammas": (1,)},
        {"capability": Capability.SLEEP, "lost_at": float("nan")},
        {"capability": Capability.SLEEP, "reason": "two\nlines"},
        {"capability": Capability.SLEEP, "reason": "x" * 513},
    ],
)
def test_a_loss_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(InvalidLossError):
        LostCapability(**wrong)


def test_an_explanation_names_the_loss_and_its_reason():
    engine = BreakingEngine()
    engine.run(100)
    engine.core.record_lost_capabilities([DFLASH])
    engine.core.next_plan()
    explanation = explain(engine.core, 4)
    assert explanation.lost == (DFLASH,)
    assert {value.arm.drafter for value in explanation.arms if not value.feasible} == {"dflash"}


def test_a_pin_to_a_lost_drafter_decodes_plainly_and_says_that_it_is_lost():
    engine = BreakingEngine()
    engine.run(100)
    engine.core.set_overrides([override(Rule(drafter="dflash"))])
    engine.core.record_lost_capabilities([DFLASH])
    plan = engine.core.next_plan()
    assert plan is not None
    assert {row.arm.gamma for row in plan.rows} == {0}
    assert "drafter dflash is pinned but lost: MemoryError: no room" in plan.reason_detail
    assert "leave nothing that this engine can run" in plan.reason_detail


def test_a_preview_of_such_a_pin_says_that_nothing_is_left():
    engine = BreakingEngine()
    engine.run(100)
    pin = override(Rule(drafter="dflash"))
    assert not any(row.stuck for row in preview_plan(engine.core, [pin]))
    engine.core.record_lost_capabilities([DFLASH])
    rows = preview_plan(engine.core, [pin])
    assert all(row.stuck and row.after.gamma == 0 for row in rows)


def test_where_everything_is_lost_the_shortest_draft_runs():
    engine = BreakingEngine(own=GAMMAS[1:])
    engine.run(50)
    own = dataclasses.replace(DFLASH, drafter="eagle3")
    engine.core.record_lost_capabilities([DFLASH, own])
    plan = engine.core.next_plan()
    assert plan is not None
    assert {row.arm.gamma for row in plan.rows} == {1}
    engine.core.force_arm(None)


def test_a_measurement_of_what_is_lost_ends_and_another_is_refused():
    engine = BreakingEngine()
    engine.run(20)
    engine.core.force_arm(Arm("dflash", 3))
    engine.core.record_lost_capabilities([DFLASH])
    plan = engine.core.next_plan()
    assert plan is not None
    assert plan.reason is not Reason.PROFILING
    with pytest.raises(UnknownArmError, match="lost drafter dflash: MemoryError"):
        engine.core.force_arm(Arm("dflash", 3))


def test_an_engine_that_cannot_sleep_any_more_is_not_told_to():
    engine = BreakingEngine()
    engine.core.set_overrides([override(Rule(off=True))])
    engine.run(20)
    assert all(row.drafter_asleep for row in engine.core.current_plan().rows)
    engine.core.record_lost_capabilities([LostCapability(Capability.SLEEP, reason="out of memory")])
    plan = engine.core.next_plan()
    assert plan is not None
    assert not any(row.drafter_asleep for row in plan.rows)


@pytest.mark.parametrize(
    ("capability", "regime"),
    [(Capability.UPDATE_ONLINE, RegimeMode.ONLINE), (Capability.COLLECT, RegimeMode.COLLECT)],
)
def test_a_regime_that_is_lost_is_not_asked_for(capability, regime):
    from controller.core.plan import Regime

    engine = BreakingEngine()
    stride = 5 if regime is RegimeMode.ONLINE else 0
    engine.core.set_overrides([override(Rule(regime=Regime(regime, stride)))])
    engine.run(20)
    assert engine.core.current_plan().regime.mode is regime
    engine.core.record_lost_capabilities(
        [LostCapability(capability, reason="its process has ended")]
    )
    plan = engine.core.next_plan()
    assert plan is not None
    assert plan.regime.mode is RegimeMode.OFF
    assert "which this engine cannot do" in plan.reason_detail


def test_nothing_is_probed_in_an_engine_that_reports_nothing_any_more():
    engine = BreakingEngine()
    engine.run(300)
    engine.core.record_lost_capabilities([LostCapability(Capability.REPORT, reason="sabotaged")])
    for _ in range(200):
        engine.clock.advance(1.0)
        plan = engine.core.next_plan() or engine.core.current_plan()
        assert all(row.probe is None for row in plan.rows)


def test_another_session_may_begin_from_what_was_learnt():
    engine = BreakingEngine()
    engine.run(600)
    engine.core.record_lost_capabilities([DFLASH])
    engine.broken = True
    engine.run(200)
    restarted = BreakingEngine()
    restarted.core.warm_start_from(engine.core.acceptance_snapshots(), "the session before")
    assert "dflash" in restarted.plans(300)
