import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import InvalidInputError
from simulator.sources import read_arrivals

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "trace.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_trace_of_dates_begins_at_zero(write):
    arrivals = read_arrivals(
        write(
            HEADER + "2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:50.9951690,396,109\n"
            "2023-11-17 00:00:00,0,1\n"
        )
    )
    assert arrivals.arrival_seconds.tolist() == pytest.approx(
        [0.0, 4.314579, 20653.31941], abs=1e-6
    )
    assert arrivals.context_tokens.tolist() == [374, 396, 0]
    assert arrivals.output_tokens.tolist() == [44, 109, 1]
    assert arrivals.arrival_seconds.dtype == np.float64
    assert arrivals.context_tokens.dtype == arrivals.output_tokens.dtype == np.int64


@pytest.mark.parametrize(
    "times",
    [
        ("100.5", "100.5", "103"),
        ("-1e1", "-10", "-7.5"),
        ("2024-05-01T10:00:00", "2024-05-01 10:00:00.0", "2024-05-01T10:00:02.5"),
        ("2024-05-01T10:00:00Z", "2024-05-01T12:00:00+02:00", "2024-05-01T05:00:02.5-05:00"),
    ],
)
def test_times_are_iso_with_or_without_a_zone_or_seconds(write, times):
    arrivals = read_arrivals(write(HEADER + "".join(f"{time},1,1\n" for time in times)))
    assert arrivals.arrival_seconds.tolist() == [0.0, 0.0, 2.5]


def test_columns_come_in_any_order_and_case_with_others_between(write):
    arrivals = read_arrivals(
        write("user,GENERATEDTOKENS,Timestamp,contextTokens\nx,3,0,2\n,4,1,5\n")
    )
    assert arrivals.output_tokens.tolist() == [3, 4]
    assert arrivals.context_tokens.tolist() == [2, 5]


def test_speed_and_limit(write):
    path = write(HEADER + "10,1,1\n14,1,2\n18,1,3\nrubbish,,\n")
    arrivals = read_arrivals(path, limit=3, speed=4.0)
    assert arrivals.arrival_seconds.tolist() == [0.0, 1.0, 2.0]
    assert read_arrivals(path, limit=1).output_tokens.tolist() == [1]


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=30).map(sorted),
    st.integers(1, 10**6),
)
def test_arrivals_ascend_from_zero(tmp_path_factory, times, tokens):
    path = tmp_path_factory.mktemp("arrivals") / "a.csv"
    path.write_text(HEADER + "".join(f"{time},{tokens},{tokens}\n" for time in times))
    arrivals = read_arrivals(path)
    assert arrivals.arrival_seconds[0] == 0
    assert np.all(np.diff(arrivals.arrival_seconds) == np.diff(times))
    assert set(arrivals.output_tokens.tolist()) == {tokens}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2,1", "2 fields, the header names 3"),
        (",1,1", "timestamp is blank"),
        ("2,,1", "contexttokens is blank"),
        ("2,1, ", "generatedtokens is blank"),
        ("noon,1,1", "timestamp 'noon' is neither a time nor a number of seconds"),
        ("nan,1,1", "timestamp 'nan' is neither a time"),
        ("inf,1,1", "timestamp 'inf' is neither a time"),
        ("1e300,1,1", "is not a number of seconds"),
        ("2,x,1", "contexttokens 'x' is not an integer"),
        ("2,1.5,1", "not an integer"),
        ("2,1,nan", "not an integer"),
        ("2,-1,1", r"contexttokens '-1' must be in \[0, 10000000\]"),
        ("2,1,0", r"generatedtokens '0' must be in \[1, 10000000\]"),
        ("2,1,-5", "generatedtokens '-5' must be in"),
        ("2,1,99999999999999999999", r"must be in \[1, 10000000\]"),
        ("0.5,1,1", "timestamp '0.5' lies before that of the row above"),
        ("2024-05-01,1,1", "some rows are numbers of seconds and some are dates"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(write, row, message):
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_arrivals(write(HEADER + "1,1,1\n" + row + "\n"))
    assert caught.value.line == 3


def test_times_with_and_without_a_zone_do_not_go_together(write):
    path = write(HEADER + "2024-05-01T10:00:00,1,1\n2024-05-01T10:00:00Z,1,1\n")
    with pytest.raises(InvalidInputError, match=r"trace.csv:3: .* time zone"):
        read_arrivals(path)


def test_a_file_without_the_columns_or_without_requests_is_refused(write):
    with pytest.raises(InvalidInputError, match=r"trace.csv:1: column generatedtokens is missing"):
        read_arrivals(write("TIMESTAMP,ContextTokens\n1,1\n"))
    with pytest.raises(InvalidInputError, match="no row below the header"):
        read_arrivals(write(HEADER))


@pytest.mark.parametrize("options", [{"limit": 0}, {"speed": 0}, {"speed": -1}, {"speed": np.nan}])
def test_options_that_cannot_be_are_refused(write, options):
    with pytest.raises(InvalidInputError):
        read_arrivals(write(HEADER + "1,1,1\n"), **options)
