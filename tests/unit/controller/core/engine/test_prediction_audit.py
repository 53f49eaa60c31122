"""Predictions against what came, and the counterfactuals, where the truth is known."""

import dataclasses
import random

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine.prediction_audit import estimate_gains
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.errors import InvalidEngineError
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import RowGroup, StepFlags, StepReport
from tests.support.virtual_engine import VirtualEngine, engine_spec, gpu_step_seconds, profile_of

CURVE = [0.8] * 7
STATIC = 3


def spec_of(safe_gamma: int | None = STATIC) -> EngineSpec:
    return dataclasses.replace(engine_spec(), safe_gamma=safe_gamma)


def make(safe_gamma: int | None = STATIC, profile_error: float = 1.0) -> VirtualEngine:
    spec, clock = spec_of(safe_gamma), VirtualClock()
    profile = profile_of(spec, gpu_step_seconds, profile_error)
    controller = EngineController(spec, PlannerSettings(), profile, clock)
    return VirtualEngine(controller, clock, gpu_step_seconds, random.Random(1))


def truth(gamma: int, tokens: int, batch_size: int) -> float:
    """Seconds in which gamma would make them, by what the virtual engine is made of."""
    expected = sum(0.8**k for k in range(1, gamma + 1))
    return tokens / (batch_size * (1 + expected)) * gpu_step_seconds(gamma, batch_size)


def test_the_counterfactuals_are_what_other_choices_would_have_taken():
    engine = make()
    engine.run(300, 4, CURVE)
    before = dict(engine.core.prediction_audit.alternative_seconds)
    wanted = {"off": 0.0, "static": 0.0}
    # Batches of several rows, so that each has to be priced as itself.
    for batch_size in (4, 32, 4, 64, 11):
        tokens = engine.tokens
        engine.run(200, batch_size, CURVE)
        new_tokens = engine.tokens - tokens
        wanted["off"] += truth(0, new_tokens, batch_size)
        wanted["static"] += truth(STATIC, new_tokens, batch_size)
    engine.clock.advance(10.0)
    engine.core.next_plan()
    for name, seconds in wanted.items():
        counterfactual_seconds = (
            engine.core.prediction_audit.alternative_seconds[name] - before[name]
        )
        assert counterfactual_seconds == pytest.approx(seconds, rel=0.05), name


def test_what_runs_as_the_static_reference_gains_nothing_over_it():
    engine = make()
    pin = Override("pin", Scope(ScopeKind.FLEET), Rule(gamma=STATIC), "ann", "test")
    engine.core.set_overrides([pin])
    engine.run(600, 8, CURVE)
    engine.clock.advance(10.0)
    engine.core.next_plan()
    prediction_audit = engine.core.prediction_audit
    assert prediction_audit.alternative_seconds["static"] == pytest.approx(
        prediction_audit.plain_seconds, rel=0.05
    )
    assert prediction_audit.alternative_seconds["off"] > 1.5 * prediction_audit.plain_seconds


def test_a_batch_range_splits_rows_and_not_the_account():
    """Rows that an override makes are not the cost table's."""
    plain, split = make(), make()
    narrow = Rule(gamma_max=7)
    bound = Override("bound", Scope(ScopeKind.FLEET), narrow, "ann", "test", 33, 41)
    split.core.set_overrides([bound])
    for engine in (plain, split):
        engine.run(500, 37, CURVE)
        engine.clock.advance(10.0)
        engine.core.next_plan()
    tokens_per_second = [
        e.core.prediction_audit.alternative_seconds["off"] / e.tokens for e in (plain, split)
    ]
    assert tokens_per_second[0] == pytest.approx(tokens_per_second[1], rel=0.02)


def test_predictions_and_expectations_come_true_with_a_right_profile():
    engine = make()
    engine.run(1000, 8, CURVE)
    prediction_audit = engine.core.prediction_audit
    assert prediction_audit.predicted_seconds == pytest.approx(
        prediction_audit.plain_seconds, rel=0.02
    )
    accepted = engine.tokens - 8 * 1000
    assert prediction_audit.expected_tokens == pytest.approx(accepted, rel=0.05)
    # Noise of 3 % leaves an error of its size.
    assert 0.01 < prediction_audit.error_seconds / prediction_audit.plain_seconds < 0.05


def test_errors_add_up_whichever_way_they_go():
    core = make().core
    for step in range(1, 101):
        seconds = gpu_step_seconds(2, 4) * (1.2 if step % 2 else 0.8)
        core.observe(StepReport(step, 4, 2048, "mtp", 2, (1, 1, 2), seconds))
    prediction_audit = core.prediction_audit
    assert prediction_audit.predicted_seconds == pytest.approx(
        prediction_audit.plain_seconds, rel=0.05
    )
    assert prediction_audit.error_seconds / prediction_audit.plain_seconds == pytest.approx(
        0.2, abs=0.03
    )


def test_a_row_that_had_ended_would_not_have_decoded_with_another_choice_either():
    """Two rows that accepted three drafts gain as many tokens a row as four that accepted six."""
    instead = []
    ended = (RowGroup("mtp", 2, (0, 1, 1)), RowGroup("mtp", 0, (2,), ended=True))
    for counts, groups in (((0, 2, 2), ()), ((2, 1, 1), ended)):
        core = make().core
        core.current_plan()
        core.observe(StepReport(1, 4, 2048, "mtp", 2, counts, 0.01, groups=groups))
        core.next_plan()
        core.force_arm(Arm("mtp", 7))
        instead.append(core.prediction_audit.alternative_seconds["off"])
    assert instead[0] == instead[1] > 0


@pytest.mark.parametrize("flags", [StepFlags(after_gap=True), StepFlags(updating=True)])
def test_steps_that_are_not_plain_are_left_out(flags: StepFlags):
    core = make().core
    core.current_plan()
    core.observe(StepReport(1, 4, 2048, "mtp", 2, (1, 1, 2), 5.0, flags))
    assert core.prediction_audit.plain_seconds == core.prediction_audit.predicted_seconds == 0
    # What it accepts is expected all the same.
    assert core.prediction_audit.expected_tokens > 0


def test_a_measurement_is_left_out():
    core = make().core
    core.force_arm(Arm("mtp", 7))
    core.observe(StepReport(1, 4, 2048, "mtp", 7, (0, 0, 0, 0, 0, 0, 0, 4), 0.01))
    assert core.prediction_audit.plain_seconds == 0


def test_an_engine_that_does_not_say_what_it_would_run_has_no_static_reference():
    engine = make(None)
    engine.run(50, 4, CURVE)
    assert set(engine.core.prediction_audit.alternative_seconds) == {"off"}
    values = {Arm("mtp", 0): 100.0, Arm("mtp", 3): 150.0}
    assert estimate_gains(values, spec_of(None), Arm("mtp", 3)) == {"off": 1.5}
    assert estimate_gains(values, spec_of(3), Arm("mtp", 3)) == {"off": 1.5, "static": 1.0}


def test_the_best_of_several_drafters_that_are_off_counts():
    values = {Arm("a", 0): 100.0, Arm("b", 0): 120.0, Arm("b", 2): 180.0}
    assert estimate_gains(values, spec_of(None), Arm("b", 2)) == {"off": 1.5}


def test_a_safe_gamma_that_is_not_prepared_is_refused():
    with pytest.raises(InvalidEngineError, match="'mtp' has not prepared safe_gamma 4"):
        spec_of(4)
