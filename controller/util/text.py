"""Makes untrusted text safe to print, formats times, and describes tables.

Control characters can command a terminal, and bidirectional control characters can disguise text.
Python's `str.isprintable` is false for both, and for line separators and lone surrogates.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

# Characters that may need an escape; \n separates lines.
_CANDIDATES: Final = re.compile(r"[^\n -~]")
# Formats of a time for `strftime`.
DATE_AND_TIME: Final = "%Y-%m-%d %H:%M:%S"
TIME: Final = "%H:%M:%S"


def to_printable(text: str) -> str:
    """Returns one line of text with all unprintable characters replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def to_printable_lines(text: str) -> str:
    """Does the same for text of several lines."""
    return "\n".join(map(to_printable, text.split("\n")))


def escape_json(text: str) -> str:
    """Escapes unprintable characters in JSON text, where only strings can contain them."""
    return _CANDIDATES.sub(lambda match: _escape(match[0], "\\u{:04x}\\u{:04x}"), text)


def escape_yaml(text: str) -> str:
    """Escapes unprintable characters in YAML text in which strings with such are quoted."""
    return _CANDIDATES.sub(lambda match: _escape(match[0], ""), text)


def _escape(character: str, pair: str) -> str:
    """Returns a printable character unchanged, and an escape for any other.

    pair: format of the two escapes of a character beyond 16 bits; "": one escape of 32 bits.
    """
    number = ord(character)
    if character.isprintable():
        return character
    if number < 0x10000:
        return f"\\u{number:04x}"
    if not pair:
        return f"\\U{number:08x}"
    beyond = number - 0x10000
    return pair.format(0xD800 + (beyond >> 10), 0xDC00 + (beyond & 0x3FF))


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of a table.

    priority: 0 is always shown; of the others, the largest are left out first if the table does not
    fit.  styles: rich's style of a cell, by its text.
    """

    title: str
    is_right_aligned: bool = False
    priority: int = 0
    styles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table, independent of the width at which it is shown.

    rows: each has as many texts as there are columns.
    """

    title: str
    columns: Sequence[TextColumn]
    rows: Sequence[tuple[str, ...]]


def number_columns(titles: Iterable[str], priorities: Mapping[str, int]) -> list[TextColumn]:
    """Returns columns of numbers; one without a priority is always shown."""
    return [
        TextColumn(title, is_right_aligned=True, priority=priorities.get(title, 0))
        for title in titles
    ]


def spread_priorities(count: int) -> list[int]:
    """Returns priorities for a series of columns: the shown ones span it, including both ends."""
    return [
        0 if index in {0, count - 1} else 3 if index % 2 else 2 if index % 4 else 1
        for index in range(count)
    ]


def timestamp_text(seconds: float, form: str = DATE_AND_TIME, *, utc: bool = False) -> str:
    """Formats Unix seconds in this machine's time zone, or in UTC; "-" for an invalid time.

    form: for `strftime`.
    """
    try:
        timestamp = datetime.fromtimestamp(seconds, UTC)
        return (timestamp if utc else timestamp.astimezone()).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "-"
