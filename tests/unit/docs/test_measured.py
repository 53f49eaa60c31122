"""docs/measured.md: each table says which version and day it is of, and which bars are missed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "measured.md"
TAKEN = re.compile(r"\d+\.\d+\.\d+ of \d{4}-\d\d-\d\d")


def tables() -> Iterator[tuple[str, str, list[str]]]:
    """(heading and number of the table, text since the heading, lines) of every table."""
    for section in re.split(r"^(?=##)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        table_matches = re.finditer(r"(?:^\|.*\n)+", body, re.MULTILINE)
        for number, table in enumerate(table_matches, 1):
            lines = table[0].splitlines()
            yield f"{heading} {number}", " ".join(body[: table.start()].split()), lines


# What has not been measured was taken on no day.
@pytest.mark.parametrize("table", [one for one in tables() if "no run yet" not in one[2][-1]],
                         ids=lambda table: table[0])  # fmt: skip
def test_every_figure_stands_with_version_and_day(table: tuple[str, str, list[str]]) -> None:
    _, before, (header, _, *rows) = table
    if header.rstrip(" |").endswith("| taken"):
        for row in rows:
            assert TAKEN.match(row.rstrip(" |").rpartition("| ")[2]), row
    else:
        assert TAKEN.search(before)


def test_no_row_is_marked_as_old_without_its_day() -> None:
    marked = [row for _, _, lines in tables() for row in lines if re.match(r"\| ?\* ", row)]
    assert not marked


def test_no_cell_is_longer_than_a_sentence() -> None:
    cells = [cell.strip() for _, _, lines in tables() for row in lines for cell in row.split("|")]
    assert [cell for cell in cells if len(cell) > 120] == []


def test_every_headline_has_a_bar_that_holds_or_is_missed_or_none() -> None:
    (headlines,) = (lines for heading, _, lines in tables() if heading == "## Headlines 1")
    for row in headlines[2:]:
        _, bar, verdict, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        assert ("no bar" in verdict) if not bar else ("holds" in verdict or "missed" in verdict)
