from dataclasses import replace

from controller.core.step_report import RowGroup, StepFlags, StepReport
from controller.service.sessions.counters import StepCounters

PLAIN = StepReport(1, 4, 100, "mtp", 2, (1, 1, 2), 0.5)
OFF = StepReport(1, 3, 100, "mtp", 0, (3,), 0.25)
ALONE = replace(PLAIN, flags=StepFlags(unsteered=True))


def counted(*reports: StepReport) -> StepCounters:
    counters, before = StepCounters(), None
    for report in reports:
        counters.add_report(report, before)
        before = report
    return counters


def test_tokens_by_length_and_by_position():
    counters = counted(PLAIN, OFF, replace(PLAIN, gamma=3, accepted_counts=(0, 0, 1, 3)))
    assert counters.sequences_by_length == [4, 1, 3, 3]
    assert counters.accepted_tokens == 1 + 2 * 3 + 3 * 3
    assert counters.accepted_by_position == [7, 6, 3]
    assert sum(counters.accepted_by_position) == counters.accepted_tokens
    assert counters.generated_tokens == counters.accepted_tokens + 4 + 3 + 4
    assert counters.drafts == 8
    assert counters.drafted_tokens == 4 * 2 + 4 * 3
    assert (counters.reports, counters.step_seconds) == (3, 1.25)


def test_a_draft_is_what_was_drafted_for_a_sequence():
    rows = (
        RowGroup("mtp", 2, (1, 0, 2)),
        RowGroup("ngram", 1, (1, 3)),
        RowGroup("", 0, (5,)),
    )
    mixed = StepReport(1, 12, 100, "mtp+ngram", 2, (7, 3, 2), 0.5, groups=rows)
    counters = counted(mixed, OFF)
    assert (counters.drafts, counters.drafted_tokens) == (7, 3 * 2 + 4 * 1)
    assert counters.drafts_by_length == [2, 3, 2]
    assert counters.accepted_tokens == 3 + 2 * 2
    assert counters.sequence_steps == 12 + 3


def test_nothing_is_counted_before_the_first_report():
    counters = counted()
    assert (counters.accepted_tokens, counters.generated_tokens, counters.accepted_by_position) == (
        0,
        0,
        [],
    )
    assert (counters.last_step_unsteered, counters.drafts_by_length) == (None, [0])


def test_a_lease_is_lost_only_where_there_was_one():
    first = counted(ALONE, ALONE)
    assert (first.lease_losses, first.unsteered_steps, first.last_step_unsteered) == (0, 2, True)
    again = counted(ALONE, PLAIN, PLAIN, ALONE, ALONE, PLAIN, ALONE, PLAIN)
    assert (again.lease_losses, again.unsteered_steps, again.last_step_unsteered) == (2, 4, False)


def test_changes_of_drafter_and_of_its_version_are_counted_once_each():
    counters = counted(
        PLAIN, replace(PLAIN, drafter="dflash"), replace(PLAIN, drafter="dflash"), PLAIN,
        *[replace(PLAIN, draft_version=2)] * 3, PLAIN,
    )  # fmt: skip
    assert (counters.drafter_changes, counters.version_swaps) == (2, 2)


def test_circumstances_are_counted():
    flags = StepFlags(eager_fallback=True, switched=True, drafter_reset=True)
    counters = counted(
        replace(PLAIN, flags=flags), replace(PLAIN, probe_id=7),
        replace(PLAIN, update_seconds=0.1, flags=StepFlags(updating=True)),
    )  # fmt: skip
    assert (counters.eager_steps, counters.switched_steps, counters.drafter_resets) == (1, 1, 1)
    assert (counters.probe_steps, counters.drafter_updates, counters.unsteered_steps) == (1, 1, 0)


def test_rows_that_had_ended_are_no_sequence_steps_and_nothing_of_theirs_is_a_draft():
    rows = (RowGroup("mtp", 2, (1, 0, 2)), RowGroup("", 0, (1,)), RowGroup("mtp", 0, (3,), True))
    mixed = StepReport(1, 7, 100, "mtp", 2, (5, 0, 2), 0.5, groups=rows, delivered_tokens=6)
    counters = counted(mixed, mixed)
    assert (counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (6, 12, 8)
    assert (counters.sequence_steps, counters.ended_sequences) == (8, 6)
    assert counters.generated_tokens == 16
    assert counters.drafts_by_length == [2, 0, 4]
    assert counters.delivered_tokens == 12


def test_delivered_tokens_are_unknown_until_a_report_says_them():
    assert counted(PLAIN).delivered_tokens is None
    assert counted(PLAIN, replace(PLAIN, delivered_tokens=0)).delivered_tokens == 0
