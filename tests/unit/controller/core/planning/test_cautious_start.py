"""Without a profile, speculation is extended only from draft lengths that have run."""

import random

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training.selective_training import TrainingSettings
from tests.support.virtual_engine import engine_spec, gpu_step_seconds


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


@pytest.mark.parametrize("seed", range(20))
def test_decisions_come_to_rest_while_no_step_runs_and_outlive_a_reload(seed: int):
    rng, clock = random.Random(seed), VirtualClock()
    core = EngineController(engine_spec(), PlannerSettings(), None, clock)
    for step in range(1, 60):
        # An engine alone runs what it likes, and so does one under a pin.
        gamma, batch_size = rng.choice((0, 0, 3, 5, 7)), rng.choice((1, 4, 16, 64))
        counts = [0] * (gamma + 1)
        counts[min(gamma, rng.choice((0, 1, 1, 2)))] = batch_size
        seconds = gpu_step_seconds(gamma, batch_size) * rng.uniform(0.8, 1.6)
        core.observe(
            StepReport(
                step, batch_size, 512 * batch_size, "mtp", gamma, tuple(counts), seconds,
                plan_epoch=core.current_plan().epoch,
            )
        )  # fmt: skip
        clock.advance(0.1)
        chosen = []
        for _ in range(8):
            core.next_plan()
            chosen.append([row.arm for row in core.current_plan().rows])
            clock.advance(0.1)
        core.use_settings(PlannerSettings(lease_seconds=5.0 + step), TrainingSettings())
        core.next_plan()
        chosen.append([row.arm for row in core.current_plan().rows])
        assert chosen[-1] == chosen[-2] == chosen[-3], f"after step {step}"
