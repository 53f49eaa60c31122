"""Without a profile, speculation is extended only from draft lengths that have run."""

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine_controller import EngineController
from controller.core.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from tests.controller.core.virtual_engine import engine_spec


def planned(core: EngineController) -> set[int]:
    return {row.arm.gamma for row in core.current_plan().rows}


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_a_pin_under_which_no_step_ran_is_no_evidence_once_it_is_cleared(gamma: int):
    core = EngineController(engine_spec(), PlannerSettings(), None, VirtualClock())
    assert planned(core) == {0}
    pin = Override("pin", Scope(ScopeKind.FLEET), Rule(gamma=gamma), "ann", "a test")
    core.set_overrides([pin])
    core.next_plan()
    assert planned(core) == {gamma}
    core.set_overrides([])
    core.next_plan()
    assert planned(core) == {0}
