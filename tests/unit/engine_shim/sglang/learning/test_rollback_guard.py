"""When a drafter's weights count as worse than they were."""

import random

import pytest

from engine_shim.sglang.learning.rollback_guard import Acceptance, Judge, Verdict


def acceptance(successes: int, trials: int) -> Acceptance:
    found = Acceptance()
    found.add(successes, trials)
    return found


def test_a_fall_is_measured_in_standard_errors() -> None:
    good = acceptance(280, 400)
    assert acceptance(280, 400).fell_from(good) == 0
    assert acceptance(300, 400).fell_from(good) < 0
    # 0.70 to 0.60: about 0.1 / sqrt(2 * 0.65 * 0.35 / 400).
    assert acceptance(240, 400).fell_from(good) == pytest.approx(2.97, abs=0.02)
    assert acceptance(100, 400).fell_from(good) > 10


def test_without_trials_nothing_has_fallen() -> None:
    assert Acceptance().fell_from(acceptance(5, 10)) == 0
    assert acceptance(5, 10).fell_from(Acceptance()) == 0


def test_certainty_on_both_sides_is_no_fall() -> None:
    assert acceptance(0, 50).fell_from(acceptance(0, 400)) == 0
    assert acceptance(50, 50).fell_from(acceptance(400, 400)) == 0


class Drafts:
    """First drafts, accepted at a rate, four a step."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.random = random.Random(4)
        self.seen = 0

    def draft(self, rate: float, count: int) -> list[Verdict]:
        """The verdicts on so many drafts, but for those that say nothing; ends with WORSE."""
        verdicts: list[Verdict] = []
        for _ in range(count // 4):
            self.seen += 4
            accepted = sum(self.random.random() < rate for _ in range(4))
            verdict = self.judge.add(accepted, 4)
            if verdict is not Verdict.NONE:
                verdicts.append(verdict)
            if verdict is Verdict.WORSE:
                return verdicts
        return verdicts


def test_nothing_is_learnt_before_there_is_something_to_compare_with() -> None:
    judge = Judge()
    assert judge.hold > 0
    Drafts(judge).draft(0.6, 196)
    assert judge.hold > 0
    Drafts(judge).draft(0.6, 4)
    assert judge.may_learn
    assert judge.before.trials == 200


def test_what_was_learnt_before_anything_was_drafted_is_the_baseline() -> None:
    judge = Judge()
    assert Judge().knows_nothing
    drafts = Drafts(judge)
    drafts.draft(0.1, 100)
    judge.updated()
    # The drafts of the first weights do not count for these.
    assert drafts.draft(0.6, 196) == []
    assert drafts.draft(0.6, 4) == [Verdict.GOOD]
    assert judge.may_learn
    assert not judge.knows_nothing
    assert not judge.unjudged
    assert judge.before.rate > 0.5
    judge.updated()
    assert drafts.draft(0.2, 900)[-1] is Verdict.WORSE


def test_weights_that_do_not_fall_are_good_every_400_drafts() -> None:
    judge = Judge()
    drafts = Drafts(judge)
    drafts.draft(0.6, 400)
    for rate in (0.7, 0.8, 0.9):
        judge.updated()
        assert drafts.draft(rate, 400) == [Verdict.GOOD]
    assert not judge.unjudged
    # Without updates there is nothing to judge: traffic may do as it likes.
    assert drafts.draft(0.1, 2000) == []


def test_a_fall_is_found_and_learning_pauses_longer_each_time() -> None:
    judge = Judge()
    drafts = Drafts(judge)
    holds = []
    for _ in range(3):
        drafts.draft(0.7, judge.hold)
        judge.updated()
        assert judge.unjudged
        assert drafts.draft(0.5, 900)[-1] is Verdict.WORSE
        assert not judge.may_learn
        holds.append(judge.hold)
        judge.restart()
        assert not judge.unjudged
    assert holds == [400, 800, 1600]
    # Something good comes of it in the end.
    drafts.draft(0.7, judge.hold)
    judge.updated()
    assert drafts.draft(0.75, 400) == [Verdict.GOOD]
    judge.updated()
    assert drafts.draft(0.3, 900)[-1] is Verdict.WORSE
    assert judge.hold == 400


def test_a_collapse_is_found_at_once() -> None:
    judge = Judge()
    drafts = Drafts(judge)
    drafts.draft(0.8, 200)
    judge.updated()
    before = drafts.seen
    assert drafts.draft(0.05, 400) == [Verdict.WORSE]
    assert drafts.seen - before <= 60


def test_weights_of_which_nothing_is_known_begin_anew() -> None:
    judge = Judge()
    Drafts(judge).draft(0.6, 300)
    judge.updated()
    judge.begin_anew()
    assert not judge.may_learn
    assert not judge.unjudged
    assert judge.before.trials == 0


def test_drafts_from_before_an_update_do_not_speak_for_it() -> None:
    judge = Judge()
    drafts = Drafts(judge)
    drafts.draft(0.6, 200)
    assert drafts.draft(0.6, 396) == []
    judge.updated()
    assert drafts.draft(0.6, 396) == []
    assert drafts.draft(0.6, 4) == [Verdict.GOOD]
    # One update after the other is judged together.
    judge.updated()
    drafts.draft(0.6, 200)
    judge.updated()
    assert drafts.draft(0.6, 200) == [Verdict.GOOD]


def test_a_small_fall_is_looked_at_until_it_is_one_or_none() -> None:
    judge = Judge()
    judge.hold = 0
    judge.before.add(2800, 4000)
    for _ in range(10):  # 0.64 of 400: 2.5 standard errors
        judge.updated()
        assert judge.add(256, 400) is not Verdict.GOOD
        if judge.hold:
            break
    assert judge.hold > 0
    assert judge.found.trials == 800


def test_many_small_falls_do_not_pass_one_by_one() -> None:
    judge = Judge()
    drafts = Drafts(judge)
    drafts.draft(0.7, 400)
    rate = 0.7
    while rate > 0.45:
        rate -= 0.01
        judge.updated()
        if Verdict.WORSE in drafts.draft(rate, 400):
            break
    assert rate > 0.5


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_false_alarms_are_rare(rate: float) -> None:
    """Weights that are neither better nor worse, judged two hundred times."""
    judge = Judge()
    drafts = Drafts(judge)
    drafts.draft(rate, 400)
    worse = 0
    for _ in range(200):
        judge.updated()
        if Verdict.WORSE in drafts.draft(rate, 400):
            worse += 1
            judge.begin_anew()
            drafts.draft(rate, 400)
    assert worse <= 3
