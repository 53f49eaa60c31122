"""The report on the edits: the best single arm, the gain over it, and differing tokens."""

import pytest

from controller.core.engine_spec import Arm
from lab.cpu_engine.models.edits import EncodedEdit
from lab.cpu_engine.pace.step_log import LoggedStep, LogPart
from lab.harness.load_generator import Answer, PhasePlay, Play
from lab.paced.edits import EditsOutcome, build_stream, shares
from lab.paced.plays import StreamPlay

EDITS = tuple(
    EncodedEdit("log" if n % 2 else "rename", (0, n, 0), tuple(range(1, 5 + n))) for n in range(6)
)
STREAM = build_stream("edits", EDITS, 2, 8, seed=3)
DILATION = 2.0


def step(drafter: str = "eagle3", gamma: int = 3, *, mixed: bool = False) -> LoggedStep:
    return LoggedStep(
        0.0, 0.0, 1.0, 1.0, 0.5, 2, 10, {}, drafter, gamma, tokens=4, mixed=mixed
    )  # fmt: skip


def played(policy: str, seconds: float, *steps: LoggedStep, wrong: bool = False) -> StreamPlay:
    """A play that took so long in the model's time."""
    answers = []
    for request in STREAM.phases[0].requests:
        tokens = [7] * request.new_tokens
        if wrong and request.index == 5:
            tokens[3] = 8
        answers.append(Answer(request, tuple(tokens), 0, 0, seconds * DILATION))
    timed_play = Play((PhasePlay(STREAM.phases[0], tuple(answers), 0.0, seconds * DILATION),))
    return StreamPlay(policy, STREAM, DILATION, timed_play, LogPart(steps or (step(),), (), 0))


OUTCOME = EditsOutcome(
    played("off", 12.0, step("", 0)),
    {Arm("eagle3", 3): played("a", 10.0), Arm("ngram", 5): played("b", 8.0, step("ngram", 5))},
    {Arm("eagle3+ngram", 3): played("c", 7.0, step(mixed=True))},
    [
        played("steered", 6.0, step(mixed=True), step("ngram", 5)),
        played("steered", 8.0, wrong=True),
    ],
)


def test_the_best_single_arm_is_the_fastest_one_of_those_that_ran() -> None:
    assert OUTCOME.best_arm == Arm("ngram", 5)
    assert OUTCOME.gain.values == pytest.approx((8 / 6, 1.0))


def test_an_answer_with_another_token_than_plain_decodings_is_counted() -> None:
    assert (OUTCOME.compared_answers, OUTCOME.differing_answers) == (8 * 5, 1)


def test_steps_are_named_by_what_drafted() -> None:
    assert shares(OUTCOME.steered[0]) == {"eagle3+ngram 3": 0.5, "ngram 5": 0.5}
    assert shares(OUTCOME.plain_play) == {"off": 1.0}


def test_a_stream_has_all_edits_once_before_any_comes_again() -> None:
    prompts = [request.prompt for request in STREAM.phases[0].requests]
    assert sorted(prompts[:6]) == sorted(edit.prompt for edit in EDITS)
    assert len(prompts) == 8
    lengths = {request.prompt: request.new_tokens for request in STREAM.phases[0].requests}
    assert all(lengths[edit.prompt] == len(edit.answer) for edit in EDITS)
