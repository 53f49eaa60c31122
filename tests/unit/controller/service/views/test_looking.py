"""Whoever looks at an engine, and however often, changes nothing that is decided for it."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance import warm_start
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.clock import VirtualClock
from controller.core.engine.checkpoint import capture_state
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm
from controller.core.plan import Plan
from controller.core.planning.overrides import Rule
from controller.core.settings import POLICIES, PlannerSettings
from controller.core.step_report import StepReport
from controller.recording.checkpoint_messages import state_to_proto
from controller.service.metrics.family import samples
from controller.service.metrics.server import ENGINE_FAMILIES
from controller.service.sessions.session import EngineSession
from controller.service.views.engine_status import EngineSnapshot, engine_detail
from controller.wire.explanations import explain, explanation_to_proto
from controller.wire.override_effects import preview_plan
from tests.support.recorded_events import TRAINING, EventfulEngine, full_spec, override

PINS = (override("pin", Rule(gamma=2)), override("no", Rule(off=True)))
SPLIT = tuple(replace(pin, max_batch_size=6) for pin in PINS)
WARM = [AcceptanceSnapshot("eagle3", label, (0.5, 0.25), (8.0, 4.0)) for label in ("", "new")]


def scrape(session: EngineSession) -> object:
    view = EngineSnapshot.from_session(session)
    return [samples(family, view) for family in ENGINE_FAMILIES]


def page(session: EngineSession) -> object:
    return engine_detail(EngineSnapshot.from_session(session))


READERS: dict[str, Callable[[EngineSession], object]] = {
    "explain": lambda session: explain(session.core),
    "explain another batch": lambda session: explain(session.core, 20),
    "explain as a message": lambda session: explanation_to_proto(explain(session.core)),
    "preview": lambda session: preview_plan(session.core, PINS),
    "preview of other rows": lambda session: preview_plan(session.core, SPLIT),
    "preview without overrides": lambda session: preview_plan(session.core, []),
    "beliefs": lambda session: warm_start.to_json(session.core.acceptance_snapshots()),
    "plan": lambda session: (session.core.current_plan(), session.core.row_for_batch(4)),
    "metrics": scrape,
    "page": page,
    "capture": lambda session: bits(session.core),
}


def bits(core: EngineController) -> bytes:
    return state_to_proto(capture_state(core)).SerializeToString(deterministic=True)


class Watched:
    """A session in the place of a core.  A viewer looks after some calls; 0: never."""

    def __init__(self, policy: str, share: float, seed: int) -> None:
        self.clock = VirtualClock(1000.0)
        core = EngineController(
            full_spec(), PlannerSettings(policy=policy), None, self.clock, TRAINING
        )
        self.session = EngineSession("secret", core, self.clock)
        self.plans = [self.session.plan]
        self._rng, self._share = random.Random(seed), share

    def look(self) -> None:
        if self._rng.random() < self._share:
            READERS[self._rng.choice(sorted(READERS))](self.session)

    def current_plan(self) -> Plan:
        return self.session.core.current_plan()

    def observe(self, report: StepReport) -> None:
        self.session.observe(report)
        self.look()

    def next_plan(self) -> Plan:
        self.plans.append(self.session.make_due_plan())
        self.look()
        return self.plans[-1]


class Driven(EventfulEngine):
    """An engine that follows the plans of a watched session."""

    def __init__(self, policy: str, share: float, seed: int) -> None:
        self.watched = Watched(policy, share, seed)
        super().__init__(self.watched, self.watched.clock, rng=random.Random(seed))  # type: ignore[arg-type]
        self.session = self.watched.session

    def attend(self) -> None:
        training = self.session.core.updates.training
        assert training is not None
        training.is_trainer_connected = not training.is_trainer_connected
        training.record_stored_signals(5)

    def configure(self, margin: float) -> None:
        now = self.session.core._settings
        self.session.use_settings(replace(now, switch_margin=margin), TRAINING)


ACTIONS: dict[str, Callable[[Driven], Any]] = {
    "run": lambda engine: engine.run(25),
    "few": lambda engine: engine.run(3, batch_size=9),
    "large": lambda engine: engine.run(12, batch_size=24, acceptance=0.5),
    "shift": lambda engine: engine.run(15, acceptance=0.1),
    "pin": lambda engine: engine.session.core.set_overrides(PINS),
    "split": lambda engine: engine.session.core.set_overrides(SPLIT),
    "free": lambda engine: engine.session.core.set_overrides([]),
    "force": lambda engine: engine.session.core.force_arm(Arm("dflash", 3)),
    "release": lambda engine: engine.session.core.force_arm(None),
    "warm": lambda engine: engine.session.warm_start_from(WARM, "elsewhere"),
    "configure": lambda engine: engine.configure(0.05),
    "attend": Driven.attend,
    "wait": lambda engine: engine.clock.advance(3.0),
}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=2, max_size=12),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_who_looks_and_when_makes_no_difference_to_any_plan(policy, actions, share, seed):
    alone, watched = Driven(policy, 0.0, seed), Driven(policy, share, seed)
    for action in ("run", *actions, "run"):
        ACTIONS[action](alone)
        ACTIONS[action](watched)
        watched.watched.look()
        assert watched.watched.plans == alone.watched.plans
        assert watched.plan == alone.plan
        assert bits(watched.session.core) == bits(alone.session.core)


@pytest.fixture
def busy() -> Driven:
    """With classes, two drafters, updates, overrides, and reports that no decision has seen yet."""
    engine = Driven("goodput", 0.0, 3)
    engine.run(120)
    engine.session.core.set_overrides(SPLIT[:1])
    engine.run(60, batch_size=12)
    for step in range(1, 4):
        counts = (2, 1, 1)
        engine.session.observe(StepReport(engine.step + step, 4, 2000, "eagle3", 2, counts, 0.012))
    assert engine.session.core.traffic.classes
    return engine


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_reader_says_the_same_twice_and_leaves_everything_as_it_was(name, busy):
    session, read = busy.session, READERS[name]
    before = pickle.dumps((session.core, session.counters, session.plan_log))
    first_reading = read(session)
    assert pickle.dumps((session.core, session.counters, session.plan_log)) == before
    assert read(session) == first_reading


def test_an_explanation_is_of_the_last_decision_until_the_next_one(busy):
    session = busy.session
    before = explain(session.core, 4)
    session.observe(StepReport(busy.step + 9, 4, 2000, "eagle3", 2, (0, 0, 4), 0.5))
    after = explain(session.core, 4)
    assert (after.arms, after.positions, after.table) == (
        before.arms, before.positions, before.table,
    )  # fmt: skip
    busy.clock.advance(1.0)
    session.make_due_plan()
    assert explain(session.core, 4).positions != before.positions


def test_overrides_are_explained_once_they_are_decided_under(busy):
    session = busy.session
    session.core.set_overrides(PINS)
    assert [o.override_id for o in explain(session.core, 4).overrides] == ["pin"]
    session.make_due_plan()
    explained = explain(session.core, 4)
    assert [o.override_id for o in explained.overrides] == ["no", "pin"]
    assert next(value.arm.gamma for value in explained.arms if value.chosen) == 0
