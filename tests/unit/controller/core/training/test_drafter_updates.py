"""Online updates and the trainer share one drafter: never both, and overrides above both."""

from dataclasses import replace

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.plan import Regime, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import RowGroup, StepReport
from controller.core.training.selective_training import TrainingResult, TrainingSettings
from controller.wire.explanations import explain

COLLECT = Regime(RegimeMode.COLLECT)
TRAINING = TrainingSettings(initial=2, unit_drafts=4, threshold=3)


ABLE = Capabilities(can_collect=True, can_take_versions=True, can_update_online=True)


def make(able: Capabilities = ABLE) -> tuple[EngineController, VirtualClock]:
    spec = EngineSpec(
        "e",
        Fingerprint("target"),
        (
            DrafterSpec("eagle3", DrafterKind.MTP, (0, 1, 3)),
            DrafterSpec("dflash", DrafterKind.DFLASH, (1, 3)),
        ),
        8,
        able,
    )
    clock = VirtualClock()
    return EngineController(spec, PlannerSettings(), None, clock, TRAINING), clock


class Driven:
    """A core whose steps accept all or nothing."""

    def __init__(self, able: Capabilities = ABLE) -> None:
        self.core, self.clock = make(able)
        self._step = 0

    def steps(
        self, accepted: int, count: int, version: int = 0, *, drafter: str = "eagle3",
        undrafted: int = 0,
    ) -> None:  # fmt: skip
        """Makes steps of four rows that are drafted for.  undrafted: further rows."""
        drafted = tuple(4 if k == accepted else 0 for k in range(4))
        counts = (drafted[0] + undrafted, *drafted[1:])
        groups: tuple[RowGroup, ...] = ()
        if undrafted:
            groups = (RowGroup(drafter, 3, drafted), RowGroup("", 0, (undrafted,)))
        for _ in range(count):
            self._step += 1
            self.clock.advance(0.02)
            self.core.observe(
                StepReport(
                    self._step, sum(counts), 400, drafter, 3, counts, 0.02, draft_version=version,
                    groups=groups,
                )
            )  # fmt: skip
            self.core.next_plan()

    @property
    def regime(self) -> Regime:
        return self.core.current_plan().regime


def test_a_fall_collects_while_a_trainer_attends():
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    driven.steps(3, 40)
    assert driven.regime == Regime()
    driven.steps(0, 40)
    assert driven.regime == COLLECT
    training.is_trainer_connected = False
    driven.steps(0, 10)
    assert driven.regime != COLLECT


def test_a_deployed_version_is_in_every_plan_and_goes_when_it_is_worse():
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    driven.steps(2, 40)
    assert training.record_stored_signals(3) == 1
    training.finish_round(TrainingResult(1, 7, 0.2, 0.6, 0.3))
    driven.steps(2, 10)
    assert driven.core.current_plan().draft_version == 7
    driven.steps(0, 40, version=7)
    assert driven.core.current_plan().draft_version == 0
    assert explain(driven.core).training is not None


def test_while_a_trainer_attends_online_updates_rest():
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    driven.steps(0, 30)
    assert explain(driven.core).updates is not None
    training.is_trainer_connected = True
    driven.steps(0, 200)
    assert driven.regime.mode is not RegimeMode.ONLINE
    assert explain(driven.core).updates is None


def test_while_a_trainer_attends_nobody_decides_about_online_updates():
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    driven.steps(1, 300)
    training.is_trainer_connected = False
    # As at the beginning: no stride was chosen, and no trial charged, for updates that never ran.
    assert driven.core.updates.stride_state is None
    driven.steps(1, 30)
    assert driven.core.updates.stride_state is not None


@pytest.mark.parametrize("regime", [Regime(), Regime(RegimeMode.ONLINE, 5)])
def test_an_override_stands_above_the_trainer(regime: Regime):
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    driven.steps(3, 40)
    driven.steps(0, 40)
    assert driven.regime == COLLECT
    pin = Override("o1", Scope(ScopeKind.FLEET), Rule(regime=regime), "me", "because")
    driven.core.set_overrides([pin])
    driven.steps(0, 10)
    assert driven.regime == regime


@pytest.mark.parametrize(
    "able", [replace(ABLE, can_collect=False), replace(ABLE, can_take_versions=False)]
)
def test_an_engine_that_cannot_has_no_training(able: Capabilities):
    driven = Driven(able)
    assert driven.core.updates.training is None
    assert explain(driven.core).training is None
    driven.steps(0, 5)
    assert driven.core.current_plan().draft_version == 0


@pytest.mark.parametrize("learner", ["", "eagle3", "dflash"])
def test_only_the_learners_fall_collects(learner: str):
    other = "eagle3" if learner == "dflash" else "dflash"
    mine = "dflash" if learner == "dflash" else "eagle3"
    driven = Driven(replace(ABLE, learner=learner))
    training = driven.core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    for drafter in (mine, other):
        driven.steps(3, 40, drafter=drafter)
    driven.steps(0, 40, drafter=other)
    assert driven.regime == Regime()
    driven.steps(0, 40, drafter=mine)
    assert driven.regime == COLLECT


def test_a_version_is_seen_to_serve_while_another_drafter_drafts():
    driven = Driven(replace(ABLE, learner="dflash"))
    training = driven.core.updates.training
    assert training is not None
    driven.steps(3, 10, version=2)
    assert training.served_version == 2


def test_rows_that_must_not_be_drafted_for_are_no_fall():
    driven = Driven()
    training = driven.core.updates.training
    assert training is not None
    training.is_trainer_connected = True
    driven.steps(3, 40)
    driven.steps(3, 80, undrafted=4)
    assert driven.regime == Regime()
