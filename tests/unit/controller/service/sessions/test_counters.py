from dataclasses import replace

from controller.core.types import StepFlags, StepReport
from controller.service.sessions.counters import Tally

PLAIN = StepReport(1, 4, 100, "mtp", 2, (1, 1, 2), 0.5)
OFF = StepReport(1, 3, 100, "mtp", 0, (3,), 0.25)
ALONE = replace(PLAIN, flags=StepFlags(unsteered=True))


def counted(*reports: StepReport) -> Tally:
    tally, before = Tally(), None
    for report in reports:
        tally.count(report, before)
        before = report
    return tally


def test_tokens_by_length_and_by_position():
    tally = counted(PLAIN, OFF, replace(PLAIN, gamma=3, accepted_counts=(0, 0, 1, 3)))
    assert tally.by_length == [4, 1, 3, 3]
    assert tally.accepted_tokens == 1 + 2 * 3 + 3 * 3
    assert tally.accepted_by_position == [7, 6, 3]
    assert sum(tally.accepted_by_position) == tally.accepted_tokens
    assert tally.generated_tokens == tally.accepted_tokens + 4 + 3 + 4
    assert tally.drafts == 8
    assert tally.drafted_tokens == 4 * 2 + 4 * 3
    assert (tally.reports, tally.step_seconds) == (3, 1.25)


def test_nothing_is_counted_before_the_first_report():
    tally = counted()
    assert (tally.accepted_tokens, tally.generated_tokens, tally.accepted_by_position) == (0, 0, [])
    assert tally.alone is None


def test_a_lease_is_lost_only_where_there_was_one():
    first = counted(ALONE, ALONE)
    assert (first.lease_losses, first.unsteered, first.alone) == (0, 2, True)
    again = counted(ALONE, PLAIN, PLAIN, ALONE, ALONE, PLAIN, ALONE, PLAIN)
    assert (again.lease_losses, again.unsteered, again.alone) == (2, 4, False)


def test_changes_of_drafter_and_of_its_version_are_counted_once_each():
    tally = counted(
        PLAIN, replace(PLAIN, drafter="dflash"), replace(PLAIN, drafter="dflash"), PLAIN,
        *[replace(PLAIN, draft_version=2)] * 3, PLAIN,
    )  # fmt: skip
    assert (tally.drafter_changes, tally.swaps) == (2, 2)


def test_circumstances_are_counted():
    flags = StepFlags(eager_fallback=True, switched=True, drafter_reset=True)
    tally = counted(
        replace(PLAIN, flags=flags), replace(PLAIN, probe_id=7),
        replace(PLAIN, update_seconds=0.1, flags=StepFlags(updating=True)),
    )  # fmt: skip
    assert (tally.eager, tally.switched, tally.resets) == (1, 1, 1)
    assert (tally.probing, tally.updates, tally.unsteered) == (1, 1, 0)
