"""TIDE's Algorithm 1, line by line, and what lies around it."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.errors import InvalidTrainingError
from controller.core.step_report import StepReport
from controller.core.training.selective_training import (
    SelectiveTraining,
    TrainingResult,
    TrainingSettings,
    TrainingState,
    from_json,
    to_json,
)

SETTINGS = TrainingSettings(
    short_decay=0.5, long_decay=0.9, margin=0.1, initial=4, threshold=10, unit_drafts=8
)
DRAFTER = "eagle3"


def make(state: TrainingState | None = None, **changes: object) -> SelectiveTraining:
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return SelectiveTraining(DRAFTER, settings, state or TrainingState(), is_trainer_connected=True)


def ready(alpha: float = 0.6) -> SelectiveTraining:
    """Past N_init, all rates alike."""
    training = make()
    for _ in range(SETTINGS.initial):
        training.observe_rate(alpha)
    return training


def report(step: int, counts: tuple[int, ...], version: int = 0, name: str = DRAFTER) -> StepReport:
    return StepReport(
        step, sum(counts), 100, name, len(counts) - 1, counts, 0.01, draft_version=version
    )


def result(
    number: int = 1,
    version: int = 1,
    alphas: tuple[float, float, float] = (0.4, 0.6, 0.5),
) -> TrainingResult:
    """alphas: in service, of the new version, of the one before it."""
    return TrainingResult(number, version, *alphas)


def deployed(alpha: float = 0.6) -> SelectiveTraining:
    training = ready(alpha)
    assert training.record_stored_signals(10) == 1
    training.finish_round(result())
    training.served_version = 1
    return training


def test_both_averages_begin_as_the_mean_of_the_first_rates():
    training = make()
    for alpha in (0.2, 0.4, 0.9, 0.5):
        training.observe_rate(alpha)
    assert training.state.short == training.state.long == pytest.approx(0.5)
    assert not training.state.collecting


@given(st.lists(st.floats(0, 1), min_size=5, max_size=60))
def test_the_averages_and_the_switch_are_the_papers(alphas: list[float]):
    training = make()
    for alpha in alphas:
        training.observe_rate(alpha)
    first = alphas[: SETTINGS.initial]
    short = long = sum(first) / len(first)
    collecting = False
    for alpha in alphas[SETTINGS.initial :]:
        short = 0.5 * short + 0.5 * alpha
        long = 0.9 * long + 0.1 * alpha
        if short < long - 0.1:
            collecting = True
    assert training.state.short == pytest.approx(short)
    assert training.state.long == pytest.approx(long)
    if abs(short - long + 0.1) > 1e-9:
        assert training.state.collecting == collecting


def test_a_fall_within_the_first_rates_starts_nothing():
    training = make()
    for alpha in (0.9, 0.9, 0.1, 0.1):
        training.observe_rate(alpha)
    assert not training.state.collecting


def test_collecting_goes_on_when_the_averages_meet_again():
    training = ready()
    training.observe_rate(0.0)
    assert training.is_collecting
    for _ in range(100):
        training.observe_rate(0.6)
    assert training.is_collecting


def test_without_a_trainer_nothing_is_collected():
    training = ready()
    training.is_trainer_connected = False
    training.observe_rate(0.0)
    assert training.state.collecting
    assert not training.is_collecting
    assert training.view.phase == "no trainer"


def test_a_round_is_ordered_at_the_threshold_and_told_again_until_it_ends():
    training = ready()
    assert training.record_stored_signals(9) == 0
    assert training.record_stored_signals(10) == 1
    assert training.view.phase == "training"
    # The trainer was killed and is back: signals have gone meanwhile, the order stands.
    assert training.record_stored_signals(3) == 1
    training.finish_round(result())
    assert training.record_stored_signals(9) == 0
    assert training.record_stored_signals(12) == 2


def learnt(training: SelectiveTraining, version: int, learnt_from: int | None) -> None:
    """A step of weights that online updates have made of `learnt_from`."""
    training.observe(replace(report(1, (1, 7), version), learnt_from=learnt_from))


def test_no_round_begins_from_weights_that_no_version_has():
    training = ready()
    learnt(training, 0, 0)
    assert training.view.learnt is True
    assert training.record_stored_signals(10) == 0
    # So that the engine stores them.
    assert training.is_collecting
    assert training.state.version == 0
    learnt(training, 3, 0)
    stored = training.view
    assert (stored.learnt, stored.state.version, stored.state.parent) == (False, 3, 0)
    assert training.record_stored_signals(10) == 1


def test_what_was_learnt_from_another_version_than_the_plans_is_not_taken():
    training = deployed()
    learnt(training, 3, 0)
    assert training.state.version == 1
    learnt(training, 2**32 - 1, 1)
    assert training.state.version == 1


def test_a_version_is_not_judged_by_what_was_learnt_from_it():
    training = deployed()
    learnt(training, 1, 1)
    for _ in range(100):
        training.observe_rate(0.0)
    assert training.state.trial is not None
    assert training.state.version == 1
    # What was learnt is stored: it is judged in its place, and the same version serves after it.
    learnt(training, 2, 1)
    assert (training.state.version, training.state.parent) == (2, 0)
    for _ in range(100):
        training.observe_rate(0.0)
    assert training.state.version == 0


@pytest.mark.parametrize(
    ("alphas", "outcome", "collecting"),
    [
        ((0.4, 0.6, 0.5), "deployed", True),
        ((0.6, 0.5, 0.4), "rejected", False),
        # As the paper has it: neither deployed nor the end of collecting.
        ((0.5, 0.5, 0.4), "kept", True),
        # Better than in service, and worse than what serves on the same signals: ours.
        ((0.4, 0.5, 0.55), "rejected", False),
    ],
)
def test_only_what_is_better_is_deployed(
    alphas: tuple[float, float, float], outcome: str, collecting: bool
):
    training = ready()
    training.observe_rate(0.0)
    training.record_stored_signals(10)
    training.finish_round(result(alphas=alphas))
    assert training.state.history[-1].outcome == outcome
    assert training.state.version == (1 if outcome == "deployed" else 0)
    assert training.state.collecting == collecting
    assert not training.state.training


def test_a_round_that_failed_ends_collecting_and_says_why():
    training = ready()
    training.observe_rate(0.0)
    training.record_stored_signals(10)
    training.finish_round(TrainingResult(1, error="gradient norm nan"))
    assert (training.state.version, training.state.collecting) == (0, False)
    record = training.state.history[-1]
    assert (record.outcome, record.result.error) == ("failed", "gradient norm nan")


@pytest.mark.parametrize("number", [0, 2])
def test_a_result_that_nobody_waits_for_is_refused(number: int):
    training = ready()
    if number:
        training.record_stored_signals(10)
    before = training.state
    with pytest.raises(InvalidTrainingError, match="not running"):
        training.finish_round(result(number or 1))
    assert training.state == before


@pytest.mark.parametrize(
    "fields",
    [
        {"round": 0},
        {"version": 0},
        {"error": "why"},
        {"version": 2**31},
        {"alpha_eval": 1.2},
        {"alpha_train": float("nan")},
        {"alpha_before": -0.1},
    ],
)
def test_a_result_that_cannot_be_is_refused(fields: dict[str, object]):
    with pytest.raises(InvalidTrainingError):
        TrainingResult(**{"round": 1, "version": 1} | fields)  # type: ignore[arg-type]


def test_rates_are_of_drafts_whose_turn_came():
    training = make(initial=1, unit_drafts=8)
    # Of 4 sequences at gamma 2: 1 accepted none (1 tried), 1 one (2), 2 two (4).
    training.observe(report(1, (1, 1, 2)))
    assert training.state.measured == 0
    training.observe(report(2, (4, 0)))
    assert training.state.measured == 1
    assert training.state.short == pytest.approx(5 / 11)


def test_other_drafters_and_plain_steps_are_no_measurement():
    training = make(initial=1, unit_drafts=1)
    training.observe(report(1, (0, 4), name="dflash"))
    training.observe(report(2, (4,)))
    assert training.state.measured == 0


def judged(alphas: list[float], before: float = 0.6) -> SelectiveTraining:
    training = deployed(before)
    for alpha in alphas:
        training.observe_rate(alpha)
    return training


def test_a_version_that_accepts_more_stays():
    training = judged([0.7] * 30)
    assert (training.state.version, training.state.trial) == (1, None)


def test_a_version_that_accepts_clearly_less_goes_early():
    training = judged([0.3] * 5)
    assert training.state.version == 0
    assert training.state.history[-1].outcome == "rolled-back"
    assert not training.state.collecting


def test_a_version_that_accepts_a_little_less_goes_at_the_last_look():
    assert judged([0.45] * 19).state.version == 1
    assert judged([0.45] * 20).state.version == 0


def test_within_the_margin_it_stays():
    training = judged([0.55] * 20)
    assert (training.state.version, training.state.trial) == (1, None)


def test_nothing_is_judged_before_the_engine_serves_it():
    training = deployed()
    training.served_version = 0
    for _ in range(30):
        training.observe_rate(0.0)
    assert training.state.version == 1
    # It comes; what lived through the change is passed over.
    for step in range(3):
        training.observe(report(step, (8, 0), version=1))
    assert training.state.trial is not None
    assert training.state.trial.units == 0
    for step in range(3, 8):
        training.observe(report(step, (8, 0), version=1))
    assert training.state.version == 0


def test_a_version_that_was_still_judged_is_nothing_to_go_back_to():
    training = deployed()
    training.record_stored_signals(10)
    training.finish_round(result(2, 2))
    training.served_version = 2
    assert (training.state.version, training.state.parent) == (2, 0)
    for _ in range(5):
        training.observe_rate(0.1)
    assert training.state.version == 0


def test_only_so_many_rounds_are_remembered():
    training = ready()
    for number in range(1, 41):
        training.record_stored_signals(10)
        training.finish_round(TrainingResult(number, error="no"))
    assert [record.result.round for record in training.state.history] == list(range(25, 41))


def test_on_stable_traffic_it_is_quiet():
    """Shares of 64 drafted sequences at two kinds of traffic, mixed: no collecting in 2,000."""
    draw = random.Random(5)
    training = SelectiveTraining(DRAFTER, TrainingSettings(), is_trainer_connected=True)
    for _ in range(2000):
        alpha = sum(draw.random() < draw.choice((0.45, 0.75)) for _ in range(100)) / 100
        training.observe_rate(alpha)
        assert not training.state.collecting


def test_a_shift_is_noticed_within_some_rates():
    draw = random.Random(6)
    training = SelectiveTraining(DRAFTER, TrainingSettings(), is_trainer_connected=True)
    for _ in range(200):
        training.observe_rate(sum(draw.random() < 0.6 for _ in range(100)) / 100)
    count = 0
    while not training.state.collecting:
        training.observe_rate(sum(draw.random() < 0.4 for _ in range(100)) / 100)
        count += 1
        assert count < 12


def test_a_state_comes_back_as_it_was_kept():
    training = judged([0.6] * 7)
    training.record_stored_signals(10)
    training.finish_round(TrainingResult(2, error="why"))
    assert training.state.trial is not None
    assert from_json(to_json(training.state)) == training.state
    assert from_json(to_json(TrainingState())) == TrainingState()


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: "{",
        lambda body: "[]",
        lambda body: json.dumps(body | {"more": 1}),
        lambda body: json.dumps({k: v for k, v in body.items() if k != "trial"}),
        lambda body: json.dumps(body | {"version": -1}),
        lambda body: json.dumps(body | {"version": True}),
        lambda body: json.dumps(body | {"version": 1.5}),
        lambda body: json.dumps(body | {"collecting": "yes"}),
        lambda body: json.dumps(body | {"short": float("nan")}),
        lambda body: json.dumps(body | {"long": "0.5"}),
        lambda body: json.dumps(body | {"history": [{"result": {}, "outcome": "deployed"}]}),
        lambda body: json.dumps(body | {"trial": {"before": None}}),
    ],
)
def test_a_state_that_is_none_is_refused(damage):
    body = json.loads(to_json(deployed().state))
    with pytest.raises(InvalidTrainingError):
        from_json(damage(body))


@pytest.mark.parametrize(
    "fields",
    [
        {"short_decay": 0.99, "long_decay": 0.9},
        {"long_decay": 1.0},
        {"margin": 0.0},
        {"initial": 0},
        {"threshold": 1},
        {"unit_drafts": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, float]):
    with pytest.raises(ValueError, match=r"must|start"):
        TrainingSettings(**fields)  # type: ignore[arg-type]
