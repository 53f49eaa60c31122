from dataclasses import replace

import pytest

from controller.core.step_report import RowGroup, StepFlags, StepReport
from controller.profiling.bench import StepFilter


def step(gamma=2, batch_size=4, context=100, **flags):
    counts = (batch_size, *[0] * gamma)
    return StepReport(
        1, batch_size, batch_size * context, "mtp", gamma, counts, 0.01, StepFlags(**flags), 7
    )


@pytest.fixture
def settled():
    filter_ = StepFilter(settle_steps=2)
    filter_.expect(4, range(50, 200))
    assert [filter_.accepts(step()) for _ in range(4)] == [False, False, True, True]
    return filter_


def test_steps_right_after_a_switch_are_left_out_flagged_or_not(settled):
    verdicts = [settled.accepts(step(gamma=3)) for _ in range(3)]
    assert verdicts == [False, False, True]
    flagged = [settled.accepts(step(gamma=1, switched=i == 0)) for i in range(3)]
    assert flagged == [False, False, True]


DISTURBED = ["after_gap", "eager_fallback", "first_use", "mixed_choice", "switched", "updating"]


@pytest.mark.parametrize("flag", DISTURBED)
def test_a_disturbed_step_and_the_one_after_it_are_left_out(settled, flag):
    verdicts = [settled.accepts(step(**{flag: i == 0})) for i in range(3)]
    assert verdicts == [False, False, True]
    assert settled.left_out[f"flagged {flag}"] == 1


def test_a_step_that_read_prompts_as_well_is_left_out(settled):
    assert not settled.accepts(replace(step(), prefill_tokens=16))
    assert settled.left_out["prefilled while decoding"] == 1
    assert settled.accepts(step())


def test_a_step_that_nobody_steered_is_left_out(settled):
    assert not settled.accepts(step(unsteered=True))
    assert settled.accepts(step())


def test_another_batch_is_left_out_and_so_is_coming_back(settled):
    assert [settled.accepts(step(batch_size=3)) for _ in range(3)] == [False] * 3
    assert [settled.accepts(step()) for _ in range(3)] == [False, False, True]
    assert settled.left_out["batch of 3"] == 3


def test_late_steps_of_another_load_are_told_by_their_context(settled):
    assert not settled.accepts(step(context=3000))
    assert settled.left_out["context of about 3000 tokens"] == 1


def test_what_is_expected_next_starts_afresh(settled):
    settled.expect(1, range(500))
    assert [settled.accepts(step(batch_size=1)) for _ in range(3)] == [False, False, True]


def test_rows_that_verified_another_width_are_left_out_and_named(settled):
    mixed = replace(step(), groups=(RowGroup("mtp", 1, (2, 0)), RowGroup("mtp", 2, (2, 0, 0))))
    alike = replace(step(), groups=(RowGroup("mtp", 2, (4, 0, 0)),))
    assert [settled.accepts(mixed), settled.accepts(alike)] == [False, True]
    assert settled.left_out["verified gamma 1 in some rows of gamma 2"] == 1
    # The rows of a mixture, or of a lookup, differ by their nature.
    uneven = StepFilter(settle_steps=0, uneven=["mtp"])
    uneven.expect(4, range(50, 200))
    assert uneven.accepts(mixed)
    narrow = replace(step(), groups=(RowGroup("mtp", 1, (4, 0)),))
    assert [settled.verified_gamma(narrow), uneven.verified_gamma(narrow)] == [1, 2]
