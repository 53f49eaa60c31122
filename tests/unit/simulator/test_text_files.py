"""Whatever the bytes, a reader gives its values or the one error that names the file."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.acceptance_trace import AcceptanceTrace
from simulator.curves import parse_acceptance
from simulator.errors import InvalidInputError
from simulator.sources import read_arrivals
from simulator.step_costs import read_profile, read_step_costs
from simulator.text_files import csv_rows, text_lines

READERS: dict[str, Callable[[Any], object]] = {
    "requests": lambda path: AcceptanceTrace.load([path]),
    "rounds": lambda path: AcceptanceTrace.load_rounds({"mtp": path}),
    "arrivals": read_arrivals,
    "step costs": read_step_costs,
    "profile": read_profile,
}
# What a fuzzer would have to find first, so that it gets past the first checks.
STARTS = {
    "requests": b'{"prompt_token_ids": [], "acc_a": {"acc_len": [1]}}\n',
    "rounds": b"commits,category,a0\n1,chat,0.5\n",
    "arrivals": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,1,1\n",
    "step costs": b"batch_size,num_draft_tokens,step_seconds\n1,1,0.5\n",
    "profile": b'{"format": "speculation-profile/1", ',
}
FIELDS = st.sampled_from(
    ["", " ", "1", "-1", "0", "2024-01-02T00:00:00+14:00", "0001-01-01T00:00:00-14:00", "nan",
     "1e5", "9" * 5000, "1_0", "\u0661", "\x00", '"', "chat", "inf", "[", "2024-01-02"]
)  # fmt: skip
LINES = st.lists(st.lists(FIELDS, min_size=1, max_size=4).map(",".join), max_size=6)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "input"


def refusal(kind, path):
    try:
        READERS[kind](path)
    except InvalidInputError as error:
        return error
    return None


@pytest.mark.parametrize("kind", READERS)
@given(content=st.one_of(st.binary(max_size=200), LINES.map(lambda ls: "\n".join(ls).encode())))
@settings(max_examples=150)
def test_any_bytes_give_values_or_the_one_error(file, kind, content):
    for start in (b"", STARTS[kind]):
        file.write_bytes(start + content)
        error = refusal(kind, file)
        assert error is None or str(error).startswith(str(file))
        assert error is None or len(str(error)) < 1000


@pytest.mark.parametrize("kind", READERS)
@given(content=st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["acc_a", "acc_", "acc_len", "prompt_token_ids", "format", "cells"]),
            inner,
        ),
    ),
))  # fmt: skip
@settings(max_examples=60)
def test_any_json_gives_values_or_the_one_error(file, kind, content):
    file.write_text(json.dumps(content))
    error = refusal(kind, file)
    assert error is None or error.source == str(file)


@given(text=st.text(max_size=60))
@settings(max_examples=200)
def test_any_acceptance_text_gives_a_source_or_the_one_error(text):
    try:
        source = parse_acceptance(text)
    except InvalidInputError:
        return
    assert source.drafters


@pytest.mark.parametrize("kind", READERS)
def test_an_empty_file_is_refused(file, kind):
    file.write_bytes(b"")
    with pytest.raises(InvalidInputError):
        READERS[kind](file)


@pytest.mark.parametrize("kind", READERS)
def test_a_line_of_200_mb_is_refused_without_reading_it(file, kind):
    file.write_bytes(b"1" * (200 << 20))
    tracemalloc.start()
    with pytest.raises(InvalidInputError):
        READERS[kind](file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 << 20
    file.unlink()


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", ["not there", "", "a\x00b"])
def test_what_cannot_be_opened_is_refused(tmp_path, kind, name):
    with pytest.raises(InvalidInputError):
        READERS[kind](str(tmp_path / name))


def test_a_fault_names_its_line(file):
    file.write_bytes(b"a\nb\n\xff\n")
    with pytest.raises(InvalidInputError, match=r"input:3: not UTF-8") as caught:
        list(text_lines(file, 10))
    assert caught.value.line == 3
    file.write_bytes(b"a\nbbbbbb\n")
    with pytest.raises(InvalidInputError, match=r"input:2: the line is longer than 5 bytes"):
        list(text_lines(file, 5))


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfA,b\r\n1,2\r\n\r\n", b' a , B \n"1", 2\n\n'])
def test_order_marks_line_ends_blanks_and_quotes_do_not_matter(file, content):
    file.write_bytes(content)
    rows = list(csv_rows(file, ("b", "a"), allow_other_columns=False))
    assert [(row.line, row.integer("a", 0, 9), row.number("b")) for row in rows] == [(2, 1, 2.0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,c\n1,2\n", "input:1: column b is missing"),
        ("a,b,a\n1,2,3\n", "input:1: column a appears twice"),
        ("a,b,c\n1,2,3\n", "input:1: the header names 'c' beside"),
        ("a,b\n1,2\n1\n", "input:3: 1 fields, the header names 2"),
        ('a,b\n1,"2\n', "input:2: not CSV"),
        ("a,b\n\n", "input: there is no row"),
        ("\n\n", "input: the file is empty"),
    ],
)
def test_what_is_no_table_is_refused(file, content, message):
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=message):
        list(csv_rows(file, ("a", "b"), allow_other_columns=False))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("", "a is blank"),
        ("x", "a 'x' is not an integer"),
        ("1.5", "not an integer"),
        ("1e3", "not an integer"),
        ("\u0661", "not an integer"),
        ("nan", "not an integer"),
        ("10", r"a '10' must be in \[0, 9\]"),
        ("-1", r"must be in \[0, 9\]"),
        ("9" * 5000, r"must be in \[0, 9\]"),
    ],
)
def test_what_is_no_such_count_is_refused(file, field, message):
    file.write_text(f"a,b\n{field},1\n", encoding="utf-8")
    (row,) = csv_rows(file, ("a", "b"), allow_other_columns=False)
    with pytest.raises(InvalidInputError, match=message) as caught:
        row.integer("a", 0, 9)
    assert caught.value.line == 2
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", ["nan", "inf", "-inf", "1e999", "1_0", "\u0661", "0x1", "one"])
def test_what_is_no_finite_number_is_refused(file, field):
    file.write_text(f"a\n{field}\n", encoding="utf-8")
    (row,) = csv_rows(file, ("a",), allow_other_columns=False)
    with pytest.raises(InvalidInputError, match=r"a .* is not a finite number"):
        row.number("a")


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_its_text(file, value):
    file.write_text(f"a\n{value!r}\n")
    (row,) = csv_rows(file, ("a",), allow_other_columns=False)
    assert row.number("a") == value
