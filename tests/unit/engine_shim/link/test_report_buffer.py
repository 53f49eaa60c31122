from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link.report_buffer import ReportBuffer
from tests.unit.engine_shim.link.numbered_reports import report, step_of


def test_the_newest_reports_stay_and_the_rest_is_counted():
    buffer = ReportBuffer(3)
    for step in range(1, 8):
        buffer.add(report(step))
    assert buffer.dropped == 4
    assert [step_of(r) for r in buffer.take_oldest(10, 1000)] == [5, 6, 7]


def test_losses_at_the_engine_are_counted_in():
    buffer = ReportBuffer(3)
    buffer.count_lost(8)
    buffer.add(report(9))
    buffer.count_lost()
    assert buffer.dropped == 9
    buffer.mark_drops_reported(9)
    assert buffer.dropped == 0


def test_reports_are_taken_up_to_a_size_and_one_that_is_larger_goes_alone():
    buffer = ReportBuffer(9)
    for size in (4, 4, 4, 20, 1):
        buffer.add(bytes(size))
    taken = [[len(r) for r in buffer.take_oldest(2, 10)] for _ in range(4)]
    assert taken == [[4, 4], [4], [20], [1]]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3)),
        st.tuples(st.just("send"), st.integers(1, 5)),
        st.tuples(st.just("fail"), st.tuples(st.integers(1, 5), st.integers(0, 6))),
    )
)


@given(st.integers(1, 6), OPERATIONS)
def test_every_report_is_sent_once_in_order_or_counted_as_dropped(capacity, operations):
    buffer = ReportBuffer(capacity)
    last_step = 0
    sent: list[int] = []
    for operation, argument in operations:
        if operation == "add":
            last_step += argument + 1  # the engine lost `argument` of them before this one
            buffer.count_lost(argument)
            buffer.add(report(last_step))
        elif operation == "send":
            sent += [step_of(r) for r in buffer.take_oldest(argument, 1000)]
        else:
            most, meanwhile = argument
            batch = buffer.take_oldest(most, 1000)
            for _ in range(meanwhile):
                last_step += 1
                buffer.add(report(last_step))
            buffer.put_back(batch)
        assert len(buffer) <= capacity
        assert sent == sorted(set(sent))
        assert len(sent) + len(buffer) + buffer.dropped == last_step
    if last_step:
        rest = [step_of(r) for r in buffer.take_oldest(capacity, 1000)]
        assert sent + rest == sorted(set(sent + rest))
        assert (sent + rest)[-1] == last_step
