"""Every setting is read by the core, and no value in its range breaks a decision."""

import dataclasses
import random
import re
from pathlib import Path

import pytest

import controller
from controller.core.clock import VirtualClock
from controller.core.constants.setting import setting_text
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, StepFlags, StepReport
from controller.core.training.selective_training import TrainingSettings
from tests.support.accepted_counts import accepted_counts

STEPS = 60
GAMMAS = (0, 1, 3)
NUMBERS = [declared for declared in dataclasses.fields(PlannerSettings) if setting_text(declared)]


def bounds():
    for declared in NUMBERS:
        text = setting_text(declared)
        assert text is not None
        # The smallest number of a range without its bound is as close to it as an operator gets.
        low = 1e-6 if text.is_open and text.low == 0 else text.low
        kind = int if declared.type in {"int", int} else float
        for value in (low, text.high):
            if kind(value) != declared.default:
                yield pytest.param(declared.name, kind(value), id=f"{declared.name}={value:g}")


# The fast window must not be longer than the slow one, so both are set.
WINDOWS = {
    "fast_exposures": "slow_exposures", "slow_exposures": "fast_exposures",
    "fast_steps": "slow_steps", "slow_steps": "fast_steps",
}  # fmt: skip


def test_every_setting_is_read():
    # `confidence_z` is read by explanations.
    sources = [*Path(controller.__file__).parent.rglob("*.py")]
    text = "\n".join(file.read_text() for file in sources if file.parent.name != "constants")
    assert [one.name for one in NUMBERS if not re.search(rf"\.{one.name}\b", text)] == []


def run(core: EngineController, clock: VirtualClock, rng: random.Random, first: int) -> None:
    """Traffic that shifts, batches that move, classes, prompts, outliers, wake-ups and probes."""
    for step in range(first, first + STEPS):
        batch_size = (1, 4, 4, 16)[step // 10 % 4]
        row = core.current_plan().row_for(batch_size)
        arm = row.probe.arm if row.probe is not None else row.arm
        if step % 11 == 0:
            arm = core.arms[step // 11 % len(core.arms)]
        counts = tuple(accepted_counts(rng, batch_size, arm.gamma, 0.9 if step % 40 < 20 else 0.3))
        seconds = 0.01 * (1 + 0.1 * arm.gamma) * (9 if step % 37 == 0 else 1)
        if step % 5:
            # Otherwise two steps of an arm take exactly as long.
            seconds *= rng.lognormvariate(0, 0.05)
        clock.advance(seconds)
        core.observe(StepReport(
            step, batch_size, batch_size * (200 + step), arm.drafter, arm.gamma, counts, seconds,
            StepFlags(switched=step % 7 == 0), probe_id=row.probe.probe_id if row.probe else 0,
            classes=(ClassCounts("a", counts),) if step % 3 else (),
            prefill_tokens=100 if step % 13 == 0 else 0,
        ))  # fmt: skip
        core.next_plan()


@pytest.mark.parametrize(("name", "value"), list(bounds()))
def test_no_value_in_its_range_breaks_a_decision(name, value):
    settings = PlannerSettings(**{WINDOWS.get(name, name): min(value, 1e6), name: value})
    drafters = [DrafterSpec(drafter, DrafterKind.MTP, GAMMAS) for drafter in ("mtp", "other")]
    capabilities = Capabilities(can_sleep=True, can_switch_drafter=True)
    spec = EngineSpec("pod", Fingerprint("target"), tuple(drafters), 16, capabilities)
    clock, rng = VirtualClock(), random.Random(1)
    core = EngineController(spec, settings, None, clock)
    run(core, clock, rng, 1)
    # A reload reaches a controller that has learnt with other settings, and leaves again.
    core.use_settings(PlannerSettings(), TrainingSettings())
    run(core, clock, rng, 1 + STEPS)
    core.use_settings(settings, TrainingSettings())
    run(core, clock, rng, 1 + 2 * STEPS)
    assert len(core.traffic.state_tracker.remembered) <= settings.remembered_states_max
