from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link.report_buffer import ReportBuffer
from tests.unit.engine_shim.link.report_packets import report


def test_the_newest_reports_stay_and_the_rest_is_counted():
    buffer = ReportBuffer(3)
    for step in range(1, 8):
        buffer.add(report(step))
    assert buffer.dropped == 4
    assert [r.step for r in buffer.take(10)] == [5, 6, 7]


def test_losses_at_the_engine_are_counted_in():
    buffer = ReportBuffer(3)
    buffer.add(report(9, dropped_before=8))
    buffer.lose()
    assert buffer.dropped == 9
    buffer.forgive(9)
    assert buffer.dropped == 0


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
    made = 0
    sent: list[int] = []
    for operation, argument in operations:
        if operation == "add":
            made += argument + 1  # the engine lost `argument` of them before this one
            buffer.add(report(made, dropped_before=argument))
        elif operation == "send":
            sent += [r.step for r in buffer.take(argument)]
        else:
            most, meanwhile = argument
            batch = buffer.take(most)
            for _ in range(meanwhile):
                made += 1
                buffer.add(report(made))
            buffer.give_back(batch)
        assert len(buffer) <= capacity
        assert sent == sorted(set(sent))
        assert len(sent) + len(buffer) + buffer.dropped == made
    if made:
        rest = [r.step for r in buffer.take(capacity)]
        assert sent + rest == sorted(set(sent + rest))
        assert (sent + rest)[-1] == made
