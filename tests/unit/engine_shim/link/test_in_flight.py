import pytest

from engine_shim.link.report_buffer import InFlightReports, ReportBuffer
from speculation.v1.service_pb2 import Received
from tests.unit.engine_shim.link.numbered_reports import report, step_of

CAPACITY = 6


def sent(buffer: ReportBuffer, *sizes: int, fails: bool = False) -> InFlightReports:
    """Messages of these sizes, steps counted from 1; the last one may come too late to leave."""
    stream = InFlightReports(buffer, "session-1")
    for size in sizes:
        stream.add_message(buffer.take_oldest(size, 1000), buffer.dropped)
    if fails:
        stream.mark_last_unsent()
    return stream


def filled(steps: int, dropped: int = 0) -> ReportBuffer:
    buffer = ReportBuffer(CAPACITY)
    buffer.count_lost(dropped)
    for step in range(1, steps + 1):
        buffer.add(report(step))
    return buffer


def steps_in(buffer: ReportBuffer) -> list[int]:
    return [step_of(packet) for packet in buffer.take_oldest(100, 1000)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_stopping_sidecar_did_not_receive_goes_back(fails: bool):
    buffer = filled(5)
    stream = sent(buffer, 2, 1, 1, fails=fails)
    stream.received = Received(reports=2)
    stream.return_unreceived(None)
    assert buffer.dropped == 0
    assert steps_in(buffer) == [3, 4, 5]


def test_of_what_did_not_arrive_a_report_that_nobody_can_read_is_lost_alone():
    buffer = filled(2)
    buffer.add(b"\xff\xff")
    buffer.add(report(4))
    stream = sent(buffer, 4)
    stream.return_unreceived(Received(reports=1))
    assert (buffer.dropped, steps_in(buffer)) == (1, [2, 4])


def test_a_write_that_failed_after_it_was_received_is_not_sent_again():
    buffer = filled(3)
    stream = sent(buffer, 2, fails=True)
    stream.received = Received(reports=2)
    stream.return_unreceived(None)
    assert steps_in(buffer) == [3]


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_next_introduction_says_that_did_not_arrive_goes_back(fails: bool):
    buffer = filled(5, dropped=4)
    stream = sent(buffer, 2, 2, fails=fails)
    stream.acknowledged = Received(reports=1)
    stream.return_unreceived(Received(reports=2, dropped_reports=4))
    assert (buffer.dropped, steps_in(buffer)) == (0, [3, 4, 5])


def test_the_last_word_counts_for_more_than_what_another_sidecar_knows():
    buffer = filled(3)
    stream = sent(buffer, 3)
    stream.received = Received(reports=3)
    stream.return_unreceived(Received())
    assert (buffer.dropped, steps_in(buffer)) == (0, [])


def test_what_a_killed_sidecar_has_not_acknowledged_counts_as_dropped():
    buffer = filled(5, dropped=4)
    stream = sent(buffer, 2, 2)
    stream.acknowledged = Received(reports=1, dropped_reports=3)
    stream.return_unreceived(None)
    assert (buffer.dropped, steps_in(buffer)) == (4, [5])


def test_a_sidecar_that_does_not_acknowledge_leaves_nothing_in_doubt():
    buffer = filled(5, dropped=4)
    stream = sent(buffer, 2, 2)
    stream.acknowledged = None
    stream.return_unreceived(None)
    assert (buffer.dropped, steps_in(buffer)) == (0, [5])


def test_without_a_last_word_what_never_left_goes_back():
    buffer = filled(5, dropped=4)
    stream = sent(buffer, 2, fails=True)
    stream.return_unreceived(None)
    assert (buffer.dropped, steps_in(buffer)) == (4, [1, 2, 3, 4, 5])


def test_losses_that_were_told_to_nobody_are_told_again():
    buffer = filled(3, dropped=7)
    stream = sent(buffer, 1)
    stream.received = Received()
    stream.return_unreceived(None)
    assert (buffer.dropped, steps_in(buffer)) == (7, [1, 2, 3])


def test_what_is_no_longer_kept_is_counted():
    buffer = ReportBuffer(CAPACITY)
    stream = InFlightReports(buffer, "session-1")
    for step in range(1, 11):
        stream.add_message([report(step)], 0)
    stream.received = Received(reports=1)
    stream.return_unreceived(None)
    assert buffer.dropped == 3
    assert steps_in(buffer) == [5, 6, 7, 8, 9, 10]


def test_a_sidecar_that_claims_more_than_was_sent_gets_nothing_again():
    buffer = filled(2)
    stream = sent(buffer, 2)
    stream.received = Received(reports=9, dropped_reports=9)
    stream.return_unreceived(None)
    assert (buffer.dropped, steps_in(buffer)) == (0, [])


def test_so_many_messages_may_be_on_their_way_until_they_are_acknowledged():
    buffer = filled(6)
    stream = InFlightReports(buffer, "session-1", max_messages=2)
    full = []
    # Of this number of reports each; without any it is a sign of life, which takes no place.
    for reports, acknowledged in ((1, 0), (0, 0), (2, 0), (0, 1), (1, 1), (0, 3), (0, 4)):
        stream.add_message(buffer.take_oldest(reports, 1000), 0)
        stream.acknowledged = Received(reports=acknowledged)
        full.append(stream.is_full)
    assert full == [False, False, True, False, True, False, False]


@pytest.mark.parametrize(("messages_max", "acknowledged"), [(0, Received()), (1, None)])
def test_a_sidecar_that_does_not_acknowledge_sets_no_limit(
    messages_max: int, acknowledged: Received | None
):
    buffer = filled(6)
    stream = InFlightReports(buffer, "session-1", messages_max)
    stream.acknowledged = acknowledged
    for _ in range(6):
        stream.add_message(buffer.take_oldest(1, 1000), 0)
        assert not stream.is_full
