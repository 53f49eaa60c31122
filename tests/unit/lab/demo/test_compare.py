import pytest

from lab.demo.compare import Mismatch, Selection, choice_shares
from lab.harness.load_generator import Play
from lab.harness.spread import Spread
from tests.unit.lab.demo.outcomes import outcome, play_of


def test_equal_tokens_are_exact_and_one_other_token_is_not():
    found = outcome()
    off, static, adaptive, steered = found.policies
    assert found.exact(off)
    assert found.exact(adaptive)
    assert found.exact(steered)
    assert not found.exact(static)
    assert found.mismatches(static.plays[0]) == ()
    assert found.mismatches(static.plays[1]) == (Mismatch(2, 2, 7, 9),)


def test_every_wrong_answer_is_found_at_its_first_wrong_token():
    found = outcome().mismatches(play_of(1.0, token=8))
    assert [(m.request, m.position) for m in found] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_ratios_are_of_the_same_repeat():
    found = outcome()
    ratio = found.ratio(found.policies[2])
    # 16 tokens: 1.6 s against 4 s, then 1 s against 2 s.
    assert ratio.values == pytest.approx((2.5, 2.0))
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.25, 2.0, 2.5))


def test_phase_ratios_are_of_the_same_phase_and_repeat():
    found = outcome()
    assert found.ratio(found.policies[0], 1).values == pytest.approx((2.0, 3.2))


def test_ours_is_the_last_policy_and_the_others_come_before():
    found = outcome()
    assert found.steered.policy == "steered"
    assert [p.policy for p in found.others] == ["off", "static-3", "sglang-adaptive"]


def test_a_sample_belongs_to_the_phase_in_whose_time_it_fell():
    found = outcome()
    assert [s.gamma for s in found.samples_of(0, 0)] == [7, 5]
    assert [s.gamma for s in found.samples_of(0, 1)] == [1]
    assert [s.gamma for s in found.samples_of(1, 1)] == []


def test_shares_of_draft_lengths_sum_to_one():
    shares = choice_shares(outcome().watched[0])
    assert shares == pytest.approx({"eagle3 1": 1 / 3, "eagle3 5": 1 / 3, "dflash 7": 1 / 3})
    assert choice_shares(()) == {}


def test_acceptance_is_told_by_domain():
    assert outcome().steered.acceptance_by_domain() == pytest.approx(
        {"code": 3.0, "csv": 3.0, "json": 3.0}
    )


def test_the_static_draft_length_is_the_one_with_the_highest_mean():
    selection = outcome().selection
    assert selection is not None
    assert selection.ranked == (3, 2, 1)
    assert selection.gamma == 3


def test_a_draft_length_that_was_played_once_does_not_beat_one_that_was_played_twice():
    lucky = Selection({1: (play_of(0.5),), 2: (play_of(0.8), play_of(0.9))})
    assert lucky.gamma == 2


def test_hindsight_takes_every_phase_at_its_own_best():
    def halves(first: float, second: float) -> Play:
        a, b = play_of(first), play_of(second)
        return Play((a.phases[0], b.phases[1]))

    found = Selection({1: (halves(1.0, 4.0),), 5: (halves(2.0, 1.0),)})
    assert found.rate(1) == pytest.approx(16 / 5)
    assert found.rate(5) == pytest.approx(16 / 3)
    assert found.hindsight == pytest.approx(16 / 2)


def test_a_spread_of_one_is_that_one():
    spread = Spread((4.0,))
    assert spread.low == spread.median == spread.high == 4.0
