"""What is counted of steps that were reported, and what is computed from it; no engine."""

import pytest

from lab.cpu_engine.pace.updates import UpdateCosts
from lab.learning.counted import (
    Step,
    acceptance,
    count_last_play_tokens,
    drafting_steps,
    gain,
    net_gain,
    update_price,
)
from speculation.v1.engine_pb2 import StepReport


def report(context: int, accepted: int, gamma: int = 3, batch_size: int = 1) -> StepReport:
    counts = [0] * (gamma + 1)
    counts[accepted] = batch_size
    return StepReport(
        kv_tokens=context, gamma=gamma, batch_size=batch_size, accepted_counts=counts,
        step_seconds=0.01, update_seconds=0.02 if context == 300 else 0.0,
    )  # fmt: skip


def answer(*gained: int, update: float = 0.0) -> tuple[Step, ...]:
    """Steps at contexts 100, 200 and so on; every third one has an update before it."""
    return tuple(
        Step(100 * number, tokens, 0.01, update if number % 3 == 0 else 0.0)
        for number, tokens in enumerate(gained, start=1)
    )


def test_only_steps_of_one_request_with_drafts_count() -> None:
    reports = [report(100, 2), report(200, 0), report(300, 3)]
    others = [report(400, 0, gamma=0), report(500, 1, gamma=7), report(600, 1, batch_size=2)]
    assert drafting_steps([*reports, *others]) == (
        Step(100, 3, 0.01, 0.0), Step(200, 1, 0.01, 0.0), Step(300, 4, 0.01, 0.02),
    )  # fmt: skip


def test_of_a_request_that_was_played_twice_the_second_play_counts() -> None:
    reports = [report(100, 0), report(200, 0), report(100, 2), report(200, 3), report(300, 1)]
    assert [step.gained_tokens for step in drafting_steps(reports)] == [3, 4, 2]
    assert count_last_play_tokens(reports) == 9


def test_acceptance_is_of_the_contexts_asked_for() -> None:
    known_answer = answer(1, 2, 3, 4)
    assert acceptance(known_answer) == 2.5
    assert acceptance(known_answer, 200, 400) == 2.5
    assert acceptance(known_answer, 400) == 4.0
    assert acceptance(known_answer, 900) == 0.0


def test_a_gain_compares_answers_to_the_same_prompt() -> None:
    answer_gain = gain([answer(2, 2), answer(3, 3)], [answer(1, 1), answer(2, 2)])
    assert answer_gain.values == (2.0, 1.5)


def test_what_is_left_of_a_gain_is_less_the_dearer_updates_are() -> None:
    off = [answer(1, 1, 1, 1, 1)]
    # An update of every fifth step lengthens it by 0.4 of a step for each.
    assert net_gain([answer(2, 2, 2, 2, 2)], off, 2.0) == pytest.approx(2 / 1.4)
    assert net_gain([answer(2, 2, 2, 2, 2)], off, 0.0) == 2.0


def test_a_price_is_that_of_the_paced_engine_but_for_what_is_counted() -> None:
    """Every position of the window is unrolled to every draft there, and 16 anchors here."""
    imposed = UpdateCosts().work_seconds(1, 48, 3) / 9.32e-3
    assert 0.7 * imposed < update_price("EAGLE3", 48) < imposed
    assert update_price("EAGLE3", 48) < update_price("EAGLE3", 256)
    assert update_price("EAGLE3", 48, 4) == pytest.approx(4 * update_price("EAGLE3", 48))
