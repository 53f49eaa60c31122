"""When a drafter's weights count as worse than they were."""

import random

import pytest

from engine_shim.sglang.learning.rollback_guard import Acceptance, GuardVerdict, RollbackGuard


def acceptance(successes: int, trials: int) -> Acceptance:
    measured_acceptance = Acceptance()
    measured_acceptance.add(successes, trials)
    return measured_acceptance


def test_a_fall_is_measured_in_standard_errors() -> None:
    good = acceptance(280, 400)
    assert acceptance(280, 400).drop_in_standard_errors(good) == 0
    assert acceptance(300, 400).drop_in_standard_errors(good) < 0
    # 0.70 to 0.60: about 0.1 / sqrt(2 * 0.65 * 0.35 / 400).
    assert acceptance(240, 400).drop_in_standard_errors(good) == pytest.approx(2.97, abs=0.02)
    assert acceptance(100, 400).drop_in_standard_errors(good) > 10


def test_without_trials_nothing_has_fallen() -> None:
    assert Acceptance().drop_in_standard_errors(acceptance(5, 10)) == 0
    assert acceptance(5, 10).drop_in_standard_errors(Acceptance()) == 0


def test_certainty_on_both_sides_is_no_fall() -> None:
    assert acceptance(0, 50).drop_in_standard_errors(acceptance(0, 400)) == 0
    assert acceptance(50, 50).drop_in_standard_errors(acceptance(400, 400)) == 0


class Drafts:
    """First drafts, accepted at a rate, four a step."""

    def __init__(self, rollback_guard: RollbackGuard) -> None:
        self.rollback_guard = rollback_guard
        self.random = random.Random(4)
        self.seen = 0

    def draft(self, rate: float, count: int) -> list[GuardVerdict]:
        """The verdicts on `count` drafts, but for the undecided ones; ends with WORSE."""
        verdicts: list[GuardVerdict] = []
        for _ in range(count // 4):
            self.seen += 4
            accepted = sum(self.random.random() < rate for _ in range(4))
            verdict = self.rollback_guard.observe(accepted, 4)
            if verdict is not GuardVerdict.NONE:
                verdicts.append(verdict)
            if verdict is GuardVerdict.WORSE:
                return verdicts
        return verdicts


@pytest.mark.parametrize(("rests", "verdict"), [(True, [GuardVerdict.WORSE]), (False, [])])
def test_a_small_fall_is_a_fall_only_once_updates_rest(
    rests: bool, verdict: list[GuardVerdict]
) -> None:
    rollback_guard = RollbackGuard()
    for _ in range(50):
        rollback_guard.observe(3, 4)
    rollback_guard.on_update()
    # 0.75 to 0.70, of 200 and 400 drafts: 1.3 standard errors.
    verdicts = [rollback_guard.observe(14, 20, updates_rest=rests) for _ in range(20)]
    assert [one for one in verdicts if one is not GuardVerdict.NONE] == verdict
    assert rollback_guard.hold_drafts == (400 if rests else 0)


@pytest.mark.parametrize(
    ("accepted", "drafts", "verdict"),
    [
        (15, 1600, GuardVerdict.GOOD),
        (16, 400, GuardVerdict.GOOD),
        # 0.735: 0.4 to 0.5 standard errors below, at every look.
        (14.7, 1600, GuardVerdict.WORSE),
    ],
    ids=["as good", "better", "a little worse"],
)
def test_once_updates_rest_weights_are_looked_at_until_it_is_clear_or_enough(
    accepted: float, drafts: int, verdict: GuardVerdict
) -> None:
    rollback_guard = RollbackGuard()
    for _ in range(50):
        rollback_guard.observe(3, 4)
    rollback_guard.on_update()
    verdicts, counted = [], 0
    for step in range(1, drafts // 20 + 1):
        new = round(accepted * step) - counted
        counted += new
        verdicts.append(rollback_guard.observe(new, 20, updates_rest=True))
    assert verdicts[-1] is verdict
    assert set(verdicts[:-1]) == {GuardVerdict.NONE}


def test_nothing_is_learnt_before_there_is_something_to_compare_with() -> None:
    rollback_guard = RollbackGuard()
    assert rollback_guard.hold_drafts > 0
    Drafts(rollback_guard).draft(0.6, 196)
    assert rollback_guard.hold_drafts > 0
    Drafts(rollback_guard).draft(0.6, 4)
    assert rollback_guard.can_learn
    assert rollback_guard.good.trials == 200


def test_what_was_learnt_before_anything_was_drafted_is_the_baseline() -> None:
    rollback_guard = RollbackGuard()
    assert RollbackGuard().has_no_baseline
    drafts = Drafts(rollback_guard)
    drafts.draft(0.1, 100)
    rollback_guard.on_update()
    # The drafts of the first weights do not count for these.
    assert drafts.draft(0.6, 196) == []
    assert drafts.draft(0.6, 4) == [GuardVerdict.GOOD]
    assert rollback_guard.can_learn
    assert not rollback_guard.has_no_baseline
    assert not rollback_guard.has_unjudged
    assert rollback_guard.good.rate > 0.5
    rollback_guard.on_update()
    assert drafts.draft(0.2, 900)[-1] is GuardVerdict.WORSE


def test_weights_that_do_not_fall_are_good_every_400_drafts() -> None:
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    drafts.draft(0.6, 400)
    for rate in (0.7, 0.8, 0.9):
        rollback_guard.on_update()
        assert drafts.draft(rate, 400) == [GuardVerdict.GOOD]
    assert not rollback_guard.has_unjudged
    # Without updates there is nothing to judge: traffic may do as it likes.
    assert drafts.draft(0.1, 2000) == []


def test_a_fall_is_found_and_learning_pauses_longer_each_time() -> None:
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    holds = []
    for _ in range(3):
        drafts.draft(0.7, rollback_guard.hold_drafts)
        rollback_guard.on_update()
        assert rollback_guard.has_unjudged
        assert drafts.draft(0.5, 900)[-1] is GuardVerdict.WORSE
        assert not rollback_guard.can_learn
        holds.append(rollback_guard.hold_drafts)
        rollback_guard.on_other_weights()
        assert not rollback_guard.has_unjudged
    assert holds == [400, 800, 1600]
    # Something good comes of it in the end.
    drafts.draft(0.7, rollback_guard.hold_drafts)
    rollback_guard.on_update()
    assert drafts.draft(0.75, 400) == [GuardVerdict.GOOD]
    rollback_guard.on_update()
    assert drafts.draft(0.3, 900)[-1] is GuardVerdict.WORSE
    assert rollback_guard.hold_drafts == 400


def test_a_collapse_is_found_at_once() -> None:
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    drafts.draft(0.8, 200)
    rollback_guard.on_update()
    before = drafts.seen
    assert drafts.draft(0.05, 400) == [GuardVerdict.WORSE]
    assert drafts.seen - before <= 60


def test_forgetting_measures_the_baseline_again() -> None:
    rollback_guard = RollbackGuard()
    Drafts(rollback_guard).draft(0.6, 300)
    rollback_guard.on_update()
    rollback_guard.reset()
    assert not rollback_guard.can_learn
    assert not rollback_guard.has_unjudged
    assert rollback_guard.good.trials == 0


def test_drafts_from_before_an_update_do_not_speak_for_it() -> None:
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    drafts.draft(0.6, 200)
    assert drafts.draft(0.6, 396) == []
    rollback_guard.on_update()
    assert drafts.draft(0.6, 396) == []
    assert drafts.draft(0.6, 4) == [GuardVerdict.GOOD]
    # One update after the other is judged together.
    rollback_guard.on_update()
    drafts.draft(0.6, 200)
    rollback_guard.on_update()
    assert drafts.draft(0.6, 200) == [GuardVerdict.GOOD]


def test_a_small_fall_is_looked_at_until_it_is_one_or_none() -> None:
    rollback_guard = RollbackGuard()
    rollback_guard.hold_drafts = 0
    rollback_guard.good.add(2800, 4000)
    for _ in range(10):  # 0.64 of 400: 2.5 standard errors
        rollback_guard.on_update()
        assert rollback_guard.observe(256, 400) is not GuardVerdict.GOOD
        if rollback_guard.hold_drafts:
            break
    assert rollback_guard.hold_drafts > 0
    assert rollback_guard.current.trials == 800


def test_many_small_falls_do_not_pass_one_by_one() -> None:
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    drafts.draft(0.7, 400)
    rate = 0.7
    while rate > 0.45:
        rate -= 0.01
        rollback_guard.on_update()
        if GuardVerdict.WORSE in drafts.draft(rate, 400):
            break
    assert rate > 0.5


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_false_alarms_are_rare(rate: float) -> None:
    """Weights that are neither better nor worse, judged two hundred times."""
    rollback_guard = RollbackGuard()
    drafts = Drafts(rollback_guard)
    drafts.draft(rate, 400)
    worse = 0
    for _ in range(200):
        rollback_guard.on_update()
        if GuardVerdict.WORSE in drafts.draft(rate, 400):
            worse += 1
            rollback_guard.reset()
            drafts.draft(rate, 400)
    assert worse <= 3


@pytest.mark.parametrize("before", [0.57, 0.97])
@pytest.mark.parametrize("seen", [380, 396])
def test_an_update_that_has_hardly_been_seen_is_not_called_good(before: float, seen: int) -> None:
    """The drafts before it would outweigh its own."""
    guard = RollbackGuard()
    drafts = Drafts(guard)
    drafts.draft(0.3, 600)
    guard.on_update()
    assert drafts.draft(before, seen) == []
    guard.on_update()
    # It has ruined the drafter.
    assert drafts.draft(0.0, 100) == [GuardVerdict.WORSE]


def test_while_a_verdict_waits_for_the_newest_weights_nothing_more_is_learnt() -> None:
    guard = RollbackGuard()
    drafts = Drafts(guard)
    drafts.draft(0.6, 600)
    guard.on_update()
    drafts.draft(0.7, 396)
    guard.on_update()
    learns = [guard.can_learn]
    drafts.draft(0.7, 4)
    learns.append(guard.can_learn)
    assert drafts.draft(0.7, 20) == [GuardVerdict.GOOD]
    learns.append(guard.can_learn)
    assert learns == [True, False, True]
