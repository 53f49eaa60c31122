"""The stride of online updates: on where it pays, off where it does not, by the rows of a plan."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.plan import PlanRow, Probe, Regime, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepFlags, StepReport
from tests.support.virtual_engine import Acceptance, VirtualEngine

GAMMAS = (0, 3)
SPEC = EngineSpec(
    "one", Fingerprint("target"), (DrafterSpec("eagle3", DrafterKind.MTP, GAMMAS),), 8,
    Capabilities(can_update_online=True),
)  # fmt: skip
# The same engine with its learner beside a drafter of which nothing is ever accepted.
SECOND = replace(
    SPEC,
    drafters=(
        DrafterSpec("other", DrafterKind.MTP, GAMMAS),
        DrafterSpec("eagle3", DrafterKind.DFLASH, (3,)),
    ),
    capabilities=Capabilities(can_update_online=True, learner="eagle3"),
)
SECONDS = {0: 0.015, 3: 0.02}


class TrainedEngine(VirtualEngine):
    """One whose drafter answers to updates; it runs no probes.

    lost: steps by an update.  ready: the step from which on its trainer takes rounds.
    """

    def __init__(
        self, gain: float, *, spec: EngineSpec = SPEC, lost: float = 0.3, base: float = 0.55,
        drift: float = 0.001, ready: int = 0,
    ) -> None:  # fmt: skip
        cells = tuple(
            ProfileCell(drafter.name, g, b, SECONDS[g], 0, 50)
            for drafter in spec.drafters
            for g in drafter.gammas
            for b in (1, 8)
        )
        known = tuple(DrafterIdentity(drafter.name) for drafter in spec.drafters)
        profile = Profile(spec.fingerprint, known, 1.0, 0.0, cells)
        clock = VirtualClock()
        core = EngineController(spec, PlannerSettings(), profile, clock)
        super().__init__(core, clock, context=1)
        self.gain, self.base, self.lost, self.drift = gain, base, lost, drift
        self.ready = ready
        self.state, self.steps_since_update, self.updates = 0.0, 0, 0
        self.dice = np.random.default_rng(1)
        self.asked: list[int] = []

    def strides(self, steps: int) -> list[int]:
        """The strides in force, step by step."""
        self.run(steps)
        return self.asked[-steps:]

    def next_probe(self, row: PlanRow) -> Probe | None:
        return None

    def decode(self, arm: Arm, batch_size: int, acceptance: Acceptance) -> StepReport:
        stride = self.plan.regime.stride
        self.asked.append(stride)
        self.steps_since_update += 1
        lands = 0 < stride <= self.steps_since_update and self.step >= self.ready
        if lands:
            self.steps_since_update = 0
            self.updates += 1
            self.state += 0.05 * (1 - self.state)
        self.state *= 1 - self.drift
        seconds = SECONDS[arm.gamma] * (1 + self.lost * lands)
        self.clock.advance(seconds)
        chance = self.base + self.gain * self.state
        most = arm.gamma if arm.drafter == "eagle3" else 0
        accepted = np.minimum(self.dice.geometric(1 - chance, batch_size) - 1, most)
        return self.report(
            arm, np.bincount(accepted, minlength=arm.gamma + 1).tolist(), seconds,
            flags=StepFlags(updating=lands), update_seconds=0.1 if lands else 0.0,
        )  # fmt: skip


def override(rule: Rule) -> Override:
    return Override("pin", Scope(ScopeKind.FLEET), rule, "someone", "to see")


def share_on(strides: list[int]) -> float:
    return sum(stride > 0 for stride in strides) / len(strides)


@pytest.mark.parametrize("spec", [SPEC, SECOND], ids=["only", "second"])
def test_updates_that_pay_are_found_and_kept(spec: EngineSpec):
    engine = TrainedEngine(0.3, spec=spec)
    engine.run(5000)
    assert share_on(engine.strides(2000)) > 0.9
    assert engine.state > 0.7


def test_a_drafter_with_nothing_to_learn_is_left_alone_but_for_trials():
    engine = TrainedEngine(0.0)
    engine.run(5000)
    assert share_on(engine.strides(4000)) < 0.15


def test_updates_that_cost_more_than_they_gain_are_not_kept():
    engine = TrainedEngine(0.05, lost=30.0)
    engine.run(1500)
    assert share_on(engine.strides(4000)) < 0.05


def test_trying_keeps_to_its_account():
    """At the start, what half a percent of the steps earns, and one trial that was under way."""
    engine = TrainedEngine(0.0, lost=1.0)
    engine.run(8000)
    assert 10 < engine.updates * engine.lost < 16 + 0.005 * 8000 + 32


@pytest.mark.parametrize("seed", range(6))
def test_a_trial_ends_when_what_is_left_of_it_would_show_nothing(seed: int):
    """A drafter that has nothing to learn, and updates of more than a step: 7 instead of 13."""
    engine = TrainedEngine(0.0, lost=1.2, base=0.78)
    engine.dice = np.random.default_rng(seed)
    engine.run(700)
    assert 0 < engine.updates * engine.lost < 0.6 * 16


@pytest.mark.parametrize("gain", [0.0, 0.15, 0.3])
def test_only_a_trial_uses_the_account(gain: float):
    """A better stride that has to wait until it may be taken costs what no trial has caused."""
    engine, before, fell = TrainedEngine(gain), None, 0
    for _ in range(3000):
        engine.run(1)
        now = engine.core.updates.stride_state
        if now is not None and before is not None and now.trial_steps < before.trial_steps:
            assert now.trying or before.trying
            fell += 1
        before = now
    assert fell > 10


def test_a_trainer_that_starts_late_finds_the_account_as_it_was():
    """Trials that last until then would cost more than the account holds."""
    engine = TrainedEngine(0.3, ready=4000)
    engine.run(4000)
    strides = engine.core.updates.stride_state
    assert strides is not None
    assert strides.updates == 0
    # What it began with, and what was earned since.
    assert strides.trial_steps == pytest.approx(16 + 0.005 * 4000)
    engine.run(1000)
    assert engine.updates > 30
    assert engine.state > 0.5


def test_once_learnt_and_not_lost_again_updates_cease():
    engine = TrainedEngine(0.3, drift=0.0, lost=1.0)
    engine.run(4000)
    assert engine.state > 0.9
    assert share_on(engine.strides(3000)) < 0.5
    assert engine.state > 0.9


def test_a_harder_traffic_brings_them_back():
    engine = TrainedEngine(0.3, drift=0.0, lost=1.0)
    engine.run(7000)
    engine.state = 0.0
    before = engine.updates
    engine.run(1500)
    assert engine.updates - before > 20
    assert engine.state > 0.5


def test_an_engine_that_cannot_update_is_never_asked_to():
    engine = TrainedEngine(0.3, spec=replace(SPEC, capabilities=Capabilities()))
    assert share_on(engine.strides(1000)) == 0.0


@pytest.mark.parametrize(
    "rule", [Rule(regime=Regime()), Rule(deny_updates=True)], ids=["pinned off", "denied"]
)
def test_an_override_keeps_them_off(rule: Rule):
    engine = TrainedEngine(0.3)
    engine.core.set_overrides([override(rule)])
    engine.core.next_plan()
    assert share_on(engine.strides(2000)) == 0.0


def test_an_override_pins_a_stride_and_its_end_gives_the_decision_back():
    engine = TrainedEngine(0.0)
    engine.core.set_overrides([override(Rule(regime=Regime(RegimeMode.ONLINE, 7)))])
    engine.core.next_plan()
    assert set(engine.strides(500)) == {7}
    engine.core.set_overrides([])
    engine.core.next_plan()
    assert 7 not in engine.strides(500)


def test_nothing_is_updated_beside_a_measurement():
    engine = TrainedEngine(0.3)
    engine.run(2000)
    assert engine.plan.regime.stride
    assert engine.core.force_arm(Arm("eagle3", 3)).regime == Regime()


def test_the_same_reports_give_the_same_strides():
    first, second = (TrainedEngine(0.3).strides(1500) for _ in range(2))
    assert first == second
    assert len(set(first)) > 1
