import logging

import pytest

from controller.util.logs import _KINDS, RepeatedLineFilter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(event: str, **fields: str) -> logging.LogRecord:
    message = {"event": event, **fields}
    return logging.LogRecord("name", logging.INFO, "path", 1, message, None, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> RepeatedLineFilter:
    return RepeatedLineFilter(clock)


def passed(limit: RepeatedLineFilter, count: int, event: str = "e", **fields: str) -> int:
    return sum(limit.filter(line(event, **fields)) for _ in range(count))


def test_ten_lines_at_once_then_ten_a_minute(limit: RepeatedLineFilter, clock: Clock):
    assert passed(limit, 100) == 10
    clock.now = 59.9
    assert passed(limit, 100) == 9
    clock.now = 10_000.0
    assert passed(limit, 100) == 10
    assert limit.suppressed == 300 - 29


def test_the_next_line_says_how_many_like_it_were_held_back(
    limit: RepeatedLineFilter, clock: Clock
):
    passed(limit, 17)
    clock.now = 6.0
    other = line("other")
    assert limit.filter(other)
    assert other.msg == {"event": "other"}
    next_record = line("e")
    assert limit.filter(next_record)
    assert next_record.msg == {"event": "e", "suppressed": 7}
    clock.now = 12.0
    again = line("e")
    assert limit.filter(again)
    assert again.msg == {"event": "e"}


def test_one_engine_does_not_take_another_ones_lines(limit: RepeatedLineFilter):
    assert passed(limit, 50, engine="a") == passed(limit, 50, engine="b") == 10
    assert passed(limit, 50, "f", engine="a") == 10
    assert passed(limit, 50, "f", override="x") == passed(limit, 50, "f", override="y") == 10


def test_lines_of_libraries_are_limited_by_their_text(limit: RepeatedLineFilter, clock: Clock):
    def record(number: int) -> logging.LogRecord:
        return logging.LogRecord("grpc", logging.ERROR, "p", 1, "no %d", (number,), None)

    assert sum(limit.filter(record(number)) for number in range(30)) == 10
    clock.now = 6.0
    next_record = record(31)
    assert limit.filter(next_record)
    assert vars(next_record)["suppressed"] == 20


def test_what_was_never_told_is_told_at_the_end_once(limit: RepeatedLineFilter):
    passed(limit, 13, engine="a")
    passed(limit, 12, engine="b")
    passed(limit, 5, "f")
    assert limit.pending_suppressed_counts() == {"e": 5}
    assert limit.pending_suppressed_counts() == {}


def test_kinds_without_end_take_no_memory_without_end(limit: RepeatedLineFilter):
    for engine in range(3 * _KINDS):
        passed(limit, 12, engine=str(engine))
    assert len(limit._buckets) == _KINDS
    # Nothing of what was held back is lost with the kinds that were forgotten.
    assert limit.pending_suppressed_counts() == {"e": 2 * 3 * _KINDS}


def test_a_kind_that_goes_on_is_not_the_one_that_is_forgotten(limit: RepeatedLineFilter):
    passed(limit, 10, engine="busy")
    for engine in range(2 * _KINDS):
        assert passed(limit, 1, engine=str(engine)) == 1
        assert passed(limit, 1, engine="busy") == 0
