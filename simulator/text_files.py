"""Reads text and CSV files line by line, with size limits; errors name the file and the line."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.errors import InvalidInputError

_MAX_CSV_LINE_BYTES = 1 << 20
_MAX_QUOTED_CHARACTERS = 40
_INTEGER_PATTERN = re.compile(r"[+-]?[0-9]+")
# More digits than any count has; int() of a much longer text would be slow.
_MAX_DIGITS = 18


def text_lines(path: Path, line_bytes_max: int) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end) of UTF-8 text, without a byte order mark.

    Raises InvalidInputError: unreadable file, not UTF-8, a line longer than line_bytes_max.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(line_bytes_max + 1):
                number += 1
                if len(line) > line_bytes_max:
                    fault = f"the line is longer than {line_bytes_max} bytes"
                    raise InvalidInputError(path, number, fault)
                yield number, _decode_line(path, number, line)
    except OSError as error:
        raise InvalidInputError(path, 0, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        # A name with a NUL in it.
        raise InvalidInputError(repr(str(path)), 0, f"is not a file name: {error}") from error


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(path, number, f"not UTF-8 text: {error.reason}") from error
    return text.rstrip("\r\n")


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One record of a CSV file: its fields by lower-case column name, without outer blanks."""

    source: Path
    line: int
    fields: dict[str, str]

    def make_error(self, text: str) -> InvalidInputError:
        """Returns the error to raise about this row."""
        return InvalidInputError(self.source, self.line, text)

    def text(self, column: str) -> str:
        """Returns a field.  Raises InvalidInputError if it is blank."""
        value = self.fields[column]
        if not value:
            raise self.make_error(f"{column} is blank")
        return value

    def integer(self, column: str, low: int, high: int) -> int:
        """Returns an integer in [least, most].  Raises InvalidInputError."""
        text = self.text(column)
        if not _INTEGER_PATTERN.fullmatch(text):
            raise self.make_error(f"{column} {quote_value(text)} is not an integer")
        if len(text) > _MAX_DIGITS or not low <= int(text) <= high:
            raise self.make_error(f"{column} {quote_value(text)} must be in [{low}, {high}]")
        return int(text)

    def number(self, column: str) -> float:
        """Returns a finite number.  Raises InvalidInputError."""
        text = self.text(column)
        value = parse_finite(text)
        if value is None:
            raise self.make_error(f"{column} {quote_value(text)} is not a finite number")
        return value


def csv_rows(path: Path, columns: Sequence[str], *, allow_other_columns: bool) -> Iterator[CsvRow]:
    """Yields records below a header that contains `columns` (lower case), in any case and order.

    allow_other_columns: further columns are allowed and ignored.  Blank lines are skipped.

    Raises InvalidInputError: the errors of `text_lines`, a header with a missing or an unknown
    column, a record with a wrong number of fields, no record.
    """
    header: list[str] | None = None
    empty = True
    reader = csv.reader(_lines(path), strict=True)
    try:
        for record in reader:
            values = [value.strip() for value in record]
            if values in ([], [""]):
                continue
            if header is None:
                header = _read_header(
                    path, reader.line_num, values, columns, allow_other_columns=allow_other_columns
                )
                continue
            if len(values) != len(header):
                raise InvalidInputError(
                    path, reader.line_num,
                    f"{len(values)} fields, the header names {len(header)}",
                )  # fmt: skip
            fields = dict(zip(header, values, strict=True))
            empty = False
            yield CsvRow(path, reader.line_num, {column: fields[column] for column in columns})
    except csv.Error as error:
        raise InvalidInputError(path, reader.line_num, f"not CSV: {error}") from error
    if header is None:
        raise InvalidInputError(path, 0, "the file is empty")
    if empty:
        raise InvalidInputError(path, 0, "there is no row below the header")


def _lines(path: Path) -> Iterator[str]:
    for _, line in text_lines(path, _MAX_CSV_LINE_BYTES):
        yield line + "\n"


def _read_header(
    path: Path,
    line: int,
    names: Sequence[str],
    columns: Sequence[str],
    *,
    allow_other_columns: bool,
) -> list[str]:
    header = [name.lower() for name in names]
    column_names = ",".join(columns)
    for column in columns:
        if header.count(column) != 1:
            fault = "is missing" if column not in header else "appears twice"
            raise InvalidInputError(
                path, line, f"column {column} {fault} in the header: {column_names}"
            )
    unknown_column = next((name for name in header if name not in columns), None)
    if unknown_column is not None and not allow_other_columns:
        raise InvalidInputError(
            path,
            line,
            f"the header names {quote_value(unknown_column)} beside what is known: {column_names}",
        )
    return header


def parse_finite(text: str) -> float | None:
    """Returns the number, or None if the text is not a finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text and text.isascii() else None


def quote_value(text: object) -> str:
    """Formats a bad value for an error text: quoted, on one line, and cut."""
    quoted = repr(text)
    return (
        quoted
        if len(quoted) <= _MAX_QUOTED_CHARACTERS
        else f"{quoted[: _MAX_QUOTED_CHARACTERS - 3]}..."
    )
