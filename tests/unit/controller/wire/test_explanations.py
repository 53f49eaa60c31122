"""The runner-up of an explanation is the second best choice that may run."""

from collections.abc import Sequence

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.planning.overrides import Override, Rule
from controller.core.settings import PlannerSettings
from controller.wire.explanations import Explanation, explain, explanation_to_proto
from tests.support.recorded_events import override
from tests.support.virtual_engine import VirtualEngine, engine_spec, gpu_step_seconds, profile_of


def explained(
    overrides: Sequence[Override] = (),
    gammas: Sequence[tuple[int, ...]] = ((0, 1, 3, 5),),
    ceiling_seconds: float = 0.0,
) -> Explanation:
    """Explains the first plan of an engine with a drafter for each of `gammas`."""
    drafters = tuple(
        DrafterSpec(f"drafter-{number}", DrafterKind.MTP, lengths)
        for number, lengths in enumerate(gammas)
    )
    spec = EngineSpec("e", Fingerprint("target", engine="virtual"), drafters, 8)
    settings = PlannerSettings(tpot_ceiling_seconds=ceiling_seconds)
    core = EngineController(spec, settings, None, VirtualClock(1000.0))
    core.set_overrides(overrides)
    core.next_plan()
    return explain(core, 4)


def ranked(explanation: Explanation) -> list[Arm]:
    """Returns all arms, the one with the highest value first."""
    return [v.arm for v in sorted(explanation.arms, key=lambda v: -v.tokens_per_second)]


def chosen(explanation: Explanation) -> Arm:
    return next(value.arm for value in explanation.arms if value.chosen)


def test_without_overrides_it_is_the_arm_with_the_second_highest_value():
    explanation = explained()
    values = sorted((value.tokens_per_second for value in explanation.arms), reverse=True)
    assert explanation.runner_up == ranked(explanation)[1]
    assert explanation.margin == pytest.approx(values[0] / values[1] - 1)


def test_it_is_not_the_running_arm_if_overrides_deny_the_best_one():
    spec, clock = engine_spec((0, 1, 3), 8), VirtualClock(1000.0)
    core = EngineController(spec, PlannerSettings(), profile_of(spec, gpu_step_seconds), clock)
    core.set_overrides([override("short", Rule(gamma_max=1))])
    VirtualEngine(core, clock).run(300, batch_size=4, acceptance=0.9)
    explanation = explain(core, 4)
    assert [arm.gamma for arm in ranked(explanation)] == [3, 1, 0]
    assert chosen(explanation).gamma == 1
    assert explanation.runner_up == Arm("mtp", 0)
    assert explanation.margin > 0


def test_there_is_none_if_overrides_leave_one_choice():
    explanation = explained([override("pin", Rule(gamma=3))])
    assert (explanation.runner_up, explanation.margin) == (None, 0.0)
    message = explanation_to_proto(explanation)
    assert (message.runner_up_drafter, message.runner_up_gamma) == ("", 0)


def test_no_speculation_is_one_choice_whichever_drafter_is_off():
    explanation = explained([override("off", Rule(off=True))], gammas=((0, 2), (0, 3)))
    assert chosen(explanation).gamma == 0
    assert explanation.runner_up is None


def test_an_arm_above_the_bound_is_no_runner_up():
    free = explained()
    assert free.runner_up is not None
    token_seconds = {value.arm: value.seconds_per_token for value in free.arms}
    bound = (token_seconds[ranked(free)[0]] + token_seconds[free.runner_up]) / 2
    assert explained(ceiling_seconds=bound).runner_up != free.runner_up
    unattainable = explained(ceiling_seconds=min(token_seconds.values()) / 2)
    assert unattainable.runner_up == free.runner_up
