"""Reports with impossible values are refused where they are made."""

import math
from typing import Any

import pytest

from controller.core.engine_spec import Arm
from controller.core.errors import InvalidReportError
from controller.core.step_report import ClassCounts, ProposalCounts, RowGroup, StepReport

GOOD: dict[str, Any] = {
    "step": 1,
    "batch_size": 4,
    "kv_tokens": 100,
    "drafter": "mtp",
    "gamma": 2,
    "accepted_counts": (1, 1, 2),
    "step_seconds": 0.01,
}


def classes(*parts):
    return tuple(ClassCounts(label, counts) for label, counts in parts)


def groups(*parts):
    return tuple(RowGroup(*part) for part in parts)


def proposals(*parts):
    return tuple(ProposalCounts(*part) for part in parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted_counts": (1, 1, 1)}, "do not sum to batch_size 4"),
        ({"accepted_counts": (1, 3)}, "gamma 2 needs 3"),
        ({"delivered_tokens": 13}, "more than 4 sequences get at gamma 2"),
        ({"groups": (RowGroup("mtp", 2, (1, 1, 2), ended=True),)}, "a group of gamma 2"),
        ({"classes": (ClassCounts("a", (1, 0, 0), (0, 4)),)}, "more sequences than the step has"),
        ({"classes": (ClassCounts("a", (1, 0, 0), (0,)),)}, "2 or none, of at least one"),
        ({"accepted_counts": (-1, 3, 2)}, "do not sum"),
        ({"gamma": 65, "accepted_counts": (4,) + (0,) * 65}, "gamma 65 must be in"),
        ({"gamma": -1, "accepted_counts": ()}, "gamma -1 must be in"),
        ({"batch_size": 0, "accepted_counts": (0, 0, 0)}, "batch_size 0 must be in"),
        ({"step_seconds": math.nan}, "not a positive time"),
        ({"step_seconds": -0.01}, "not a positive time"),
        ({"step_seconds": 0.0}, "not a positive time"),
        ({"step_seconds": math.inf}, "not a positive time"),
        ({"kv_tokens": -1}, "is negative"),
        ({"classes": classes(("a", (1, 0, 0)), ("a", (0, 1, 0)))}, "2 classes, unique ones"),
        ({"classes": classes(*((f"c{i}", (1, 0, 0)) for i in range(65)))}, "65 classes"),
        ({"classes": classes(("", (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("x" * 65, (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("a\nb", (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("a", (1, 0)))}, "are not 3 counts"),
        ({"classes": classes(("a", (0, 0, 0)))}, "at least one sequence"),
        ({"classes": classes(("a", (-1, 1, 0)))}, "are not 3 counts"),
        ({"classes": classes(("a", (1, 0, 2)), ("b", (1, 0, 0)))}, "more sequences than"),
        ({"confidences": (0.5,)}, "are not 2 probabilities"),
        ({"confidences": (0.5, 1.1)}, "are not 2 probabilities"),
        ({"confidences": (0.5, math.nan)}, "are not 2 probabilities"),
        ({"prefill_tokens": -1}, "prefill_tokens -1 must be in"),
        ({"prefill_tokens": 1 << 25}, r"must be in \[0, 16777216\]"),
        ({"groups": groups(("mtp", 2, (1, 1, 1)))}, "its groups accepted"),
        ({"groups": groups(("mtp", 3, (1, 1, 2, 0)))}, "a group of gamma 3"),
        ({"groups": groups(("mtp", 2, (2, 1, 2)), ("mtp", 0, (-1,)))}, "a group of gamma 0"),
        ({"groups": groups(("", 2, (1, 1, 2)))}, "a group of gamma 2"),
        ({"groups": groups(*[("mtp", 0, (0,))] * 17)}, "17 groups of rows, 16 at most"),
        ({"proposals": proposals(("ngram", 3, (1, 0)), ("ngram", 3, (1, 0)))}, "counted twice"),
        ({"proposals": proposals(("ngram", 3, (3, 1), (1,)))}, "5 proposals of 'ngram' in a batch"),
        ({"proposals": proposals(("ngram", 3, (3, 1), (1, 0)))}, "are not of one width"),
        ({"proposals": proposals(("ngram", 3, (3,)))}, "are not of one width"),
        ({"proposals": proposals(("ngram", 3, (3, -1)))}, "are not of one width"),
        ({"proposals": proposals(*(("ngram", m, (1, 0)) for m in range(65)))}, "65 entries"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_says_why(change, message):
    with pytest.raises(InvalidReportError, match=message):
        StepReport(**(GOOD | change))


def test_a_good_report_is_taken():
    assert StepReport(**GOOD).arm == Arm("mtp", 2)


def test_classes_may_leave_sequences_out():
    parts = classes(("code", (0, 0, 2)), ("chat", (1, 0, 0)))
    assert StepReport(**GOOD, classes=parts, confidences=(0.9, 0.0)).classes == parts


def test_rows_that_must_not_be_drafted_for_say_nothing_of_the_drafter():
    parts = groups(("mtp", 2, (0, 1, 2)), ("", 0, (1,)))
    report = StepReport(**GOOD, groups=parts)
    assert report.drafted_counts == ([0, 1, 2], ())
    assert report.undrafted_share == 0.25


def test_a_narrow_row_that_was_accepted_whole_is_censored_at_its_width():
    parts = groups(("mtp", 2, (0, 0, 2)), ("mtp", 1, (1, 1)))
    assert StepReport(**GOOD, groups=parts).drafted_counts == ([1, 0, 2], [0, 1])


def test_proposals_are_summed_over_match_lengths():
    parts = proposals(("ngram", 0, (1, 0)), ("ngram", 4, (0, 1, 0), (0, 2)))
    assert StepReport(**GOOD, proposals=parts).proposal_counts_by_drafter == {
        "ngram": ([1, 1, 0], [0, 2])
    }


def test_what_a_step_shows_of_its_own_drafter_is_said_apart_where_answers_ended():
    own = proposals(("mtp", 0, (1, 1, 1), (0, 1)))
    report = StepReport(**GOOD, proposals=own)
    assert report.drafted_counts == ([1, 1, 1], [0, 1])
    idle = proposals(("ngram", 0, (0, 4, 0), (0, 0)))
    assert StepReport(**GOOD, proposals=idle).drafted_counts == ((1, 1, 2), ())


def test_rows_that_had_ended_show_nothing():
    parts = groups(("mtp", 2, (0, 1, 2)), ("mtp", 0, (1,), True))
    report = StepReport(**GOOD, groups=parts)
    assert report.drafted_counts == ([0, 1, 2], ())
    assert (report.ended_rows, report.undrafted_share) == (1, 0.0)
    assert (report.decoded_rows, report.generated_tokens) == (3, 3 + 1 + 2 * 2)


def test_classes_may_have_sequences_of_which_not_all_is_known():
    part = ClassCounts("code", (1, 1, 0), (0, 2))
    assert StepReport(**GOOD, classes=(part,)).classes == (part,)
