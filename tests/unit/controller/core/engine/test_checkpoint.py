"""A core's variables, out and in again: a core that resumes from them decides the same."""

import dataclasses
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.clock import VirtualClock
from controller.core.engine.checkpoint import (
    RecordedMember,
    RecordedObject,
    capture_state,
    restore_state,
)
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm
from controller.core.errors import InvalidStateError
from controller.core.planning.overrides import Rule
from controller.core.recorded_state import RECORDED_BY_CLASS, RECORDED_BY_NAME
from controller.core.settings import POLICIES, PlannerSettings
from controller.core.step_report import StepReport
from controller.recording.checkpoint_messages import state_from_proto, state_to_proto
from controller.wire.explanations import explain
from speculation.v1 import record_pb2
from tests.support.recorded_events import TRAINING, EventfulEngine, full_spec, override
from tests.support.virtual_engine import engine_spec, gpu_step_seconds, profile_of

GOLDEN_NAMES = Path(__file__).with_name("recorded_names.json")


def fresh(clock: VirtualClock, policy: str = "goodput") -> EngineController:
    return EngineController(full_spec(), PlannerSettings(policy=policy), None, clock, TRAINING)


def attend(engine: EventfulEngine) -> None:
    training = engine.core.updates.training
    assert training is not None
    training.is_trainer_connected = not training.is_trainer_connected
    training.record_stored_signals(5)


PINS = (override("pin", Rule(gamma=2)), override("no", Rule(off=True)))
BOUND = override("slow", Rule(tpot_max_seconds=0.004))
WARM = [AcceptanceSnapshot("eagle3", label, (0.5, 0.25), (8.0, 4.0)) for label in ("", "new")]
ACTIONS: dict[str, Callable[[EventfulEngine], object]] = {
    "run": lambda engine: engine.run(30),
    "large": lambda engine: engine.run(10, batch_size=24, acceptance=0.5),
    "shift": lambda engine: engine.run(20, acceptance=0.1),
    "pin": lambda engine: engine.core.set_overrides(PINS),
    "bound": lambda engine: engine.core.set_overrides([BOUND]),
    "free": lambda engine: engine.core.set_overrides([]),
    "force": lambda engine: engine.core.force_arm(Arm("dflash", 3)),
    "release": lambda engine: engine.core.force_arm(None),
    "warm": lambda engine: engine.core.warm_start_from(WARM, "elsewhere"),
    "attend": attend,
    "wait": lambda engine: engine.clock.advance(3.0),
}
SOME = st.sampled_from(sorted(ACTIONS))


def act(action: str, engine: EventfulEngine) -> None:
    ACTIONS[action](engine)


def through_proto(tree):
    data = state_to_proto(tree).SerializeToString(deterministic=True)
    return state_from_proto(record_pb2.StateObject.FromString(data))


def bits(core) -> bytes:
    return state_to_proto(capture_state(core)).SerializeToString(deterministic=True)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, deadline=None)
@given(before=st.lists(SOME, max_size=8), after=st.lists(SOME, min_size=1, max_size=5))
def test_a_restored_core_goes_on_as_the_first_one(policy, before, after):
    clock = VirtualClock(1000.0)
    first = EventfulEngine(fresh(clock, policy), clock)
    for action in before:
        act(action, first)
    second_clock = VirtualClock(clock.now())
    core = fresh(second_clock, policy)
    core.set_overrides(first.core.overrides)
    restore_state(core, through_proto(capture_state(first.core)))
    assert bits(core) == bits(first.core)
    second = EventfulEngine(core, second_clock)
    second.rng.setstate(first.rng.getstate())
    second.step = first.step
    for action in after:
        act(action, first)
        act(action, second)
        assert second.plan == first.plan
        assert bits(second.core) == bits(first.core)


def _not_recorded(core: EngineController) -> dict[str, dict[str, str]]:
    """By class of the core's objects, the attributes that no recording determines, as texts."""
    missing_names: dict[str, dict[str, str]] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                look(item)
        if (declared := RECORDED_BY_CLASS.get(type(value))) is None or isinstance(value, Enum):
            return
        held = set(declared.fields.values())
        known = held.union(declared.derived)
        every = vars(value) if hasattr(value, "__dict__") else {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value)
        }  # fmt: skip
        rest = {name: repr(item) for name, item in every.items() if name not in known}
        missing_names.setdefault(declared.name, {}).update(rest)
        for name in held:
            look(getattr(value, name))

    look(core)
    return missing_names


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_recorded_never_changes(policy):
    clock = VirtualClock()
    core = fresh(clock, policy)
    engine = EventfulEngine(core, clock)
    act("bound", engine)
    before = _not_recorded(core)
    for action in ("run", "shift", "large", "attend", "run"):
        act(action, engine)
    after = _not_recorded(core)
    for name, attributes in before.items():
        if name == "controller":
            # Made again at every decision, and read by people only.
            assert attributes.pop("decision") != after[name].pop("decision")
        assert after[name] == attributes


def test_the_recorded_names_are_the_golden_ones():
    # Whoever changes a name here makes old recordings unreadable: raise the format's version, too.
    recorded_names = {name: sorted(declared.fields) for name, declared in RECORDED_BY_NAME.items()}
    assert recorded_names == json.loads(GOLDEN_NAMES.read_text())


def test_a_recording_from_before_a_variable_was_added_is_restored():
    clock = VirtualClock()
    engine = EventfulEngine(fresh(clock), clock)
    engine.run(50)
    taken = capture_state(engine.core)
    del taken["traffic"].fields["used_at"]
    core = fresh(clock)
    restore_state(core, taken)
    assert core.traffic.classes.keys() == engine.core.traffic.classes.keys()
    del taken["traffic"].fields["mix"]
    with pytest.raises(InvalidStateError, match=r"traffic_estimator\.mix"):
        restore_state(fresh(clock), taken)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_variable_that_only_earlier_recordings_have_is_ignored(policy):
    clock = VirtualClock()
    engine = EventfulEngine(fresh(clock, policy), clock)
    engine.run(50)
    taken = capture_state(engine.core)
    del taken["explorer"].fields["gamma_zero_budget_share"]
    # What earlier versions recorded there, of a class that is no longer declared.
    price = RecordedObject("observation_cost", {"loss": np.zeros(3), "arm": np.zeros((1, 3))})
    for observation in (None, price):
        taken["planner"].fields["observation"] = observation
        core = fresh(clock, policy)
        restore_state(core, through_proto(taken))
        assert not hasattr(core._planner, "observation")
        assert core._planner.choice == engine.core._planner.choice
        assert core.explorer.gamma_zero_budget_share == 0.0
    taken["explorer"].fields["observation"] = None
    with pytest.raises(InvalidStateError, match=r"explorer\.observation is recorded but not known"):
        restore_state(fresh(clock, policy), taken)


def test_a_capture_does_not_move_with_the_core():
    clock = VirtualClock()
    engine = EventfulEngine(fresh(clock), clock)
    engine.run(50)
    taken = capture_state(engine.core)
    before = state_to_proto(taken).SerializeToString(deterministic=True)
    engine.run(200, acceptance=0.2)
    assert state_to_proto(taken).SerializeToString(deterministic=True) == before


def test_another_profile_is_part_of_the_new_core():
    clock, spec = VirtualClock(), engine_spec()
    core = EngineController(spec, PlannerSettings(), profile_of(spec, gpu_step_seconds), clock)
    core.observe(StepReport(1, 4, 2048, "mtp", 2, (1, 1, 2), 0.011))
    core.force_arm(None)
    other = EngineController(spec, PlannerSettings(), profile_of(spec, gpu_step_seconds), clock)
    restore_state(other, capture_state(core))
    assert explain(other).arms == explain(core).arms


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda tree: tree.pop("epoch"), "controller.epoch is missing in the recording"),
        (lambda tree: tree.update(extra=1), "controller.extra is recorded but not known here"),
        (lambda tree: tree.pop("traffic"), "traffic"),
        (lambda tree: tree.update(traffic=3), "fields"),
        (lambda tree: tree["cost"].fields.pop("steps"), "cost_model.steps is missing"),
        (lambda tree: tree["cost"].fields.update(_cell=0), "cost_model._cell is recorded but"),
        (lambda tree: tree.update(explorer=RecordedObject("os.system", {})), "os.system"),
        (lambda tree: tree.update(explorer=RecordedObject("cost_model", {})), "cost_model"),
        (lambda tree: tree.update(explorer=RecordedObject("reason", {})), "reason"),
        (lambda tree: tree.update(plan=RecordedMember("reason", "NONE")), "NONE"),
        (
            lambda tree: tree.update(plan=RecordedMember("plan", "EXPLOIT")),
            "plan is not an enumeration",
        ),
        (lambda tree: tree.update(plan=RecordedMember("types.Plan", "EXPLOIT")), "types.Plan"),
    ],
)
def test_what_is_no_state_is_refused(break_it, text):
    clock = VirtualClock()
    core = fresh(clock)
    tree = capture_state(core)
    break_it(tree)
    with pytest.raises(InvalidStateError, match=text):
        restore_state(fresh(clock), tree)


def test_an_opening_is_small():
    clock = VirtualClock()
    engine = EventfulEngine(fresh(clock), clock)
    engine.run(200)
    assert len(bits(engine.core)) < 120_000
