"""Makes words and moments of others harmless to whoever prints them, and holds tables as texts.

Control characters command a terminal, and characters that turn the direction of text show something
else than what is there.  Python's `str.isprintable` is false for all of them, and for line
separators and half characters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

# Printable text has none of these; \n stands between lines.
_CANDIDATES: Final = re.compile(r"[^\n -~]")
# Forms of a moment, in the words of `strftime`.
DATE_AND_TIME: Final = "%Y-%m-%d %H:%M:%S"
TIME: Final = "%H:%M:%S"


def printable(words: str) -> str:
    """Returns one line of words without what could command a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def printable_lines(text: str) -> str:
    """Does the same for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def escaped_json(text: str) -> str:
    """Escapes what is not printable in JSON, where it can only stand in strings."""
    return _CANDIDATES.sub(lambda found: _escape(found[0], "\\u{:04x}\\u{:04x}"), text)


def escaped_yaml(text: str) -> str:
    """Escapes what is not printable in YAML whose strings with such characters are in quotes."""
    return _CANDIDATES.sub(lambda found: _escape(found[0], ""), text)


def _escape(character: str, pair: str) -> str:
    """Returns a printable character as it is, and an escape for another one.

    pair: how a character beyond 16 bits is written as two; "": as one of 32 bits.
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
    """Describes a column of a table.

    priority: 0 is always shown; of the others, the largest are left out first where the table does
    not fit.  styles: how a cell with this text is drawn, in rich's words.
    """

    title: str
    right: bool = False
    priority: int = 0
    styles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextTable:
    """Holds a table, however wide the place is where it is shown.

    rows: as many texts each as there are columns.
    """

    title: str
    columns: Sequence[TextColumn]
    rows: Sequence[tuple[str, ...]]


def numbers(titles: Iterable[str], priorities: Mapping[str, int]) -> list[TextColumn]:
    """Describes columns of numbers; a title without a priority is always shown."""
    return [TextColumn(title, right=True, priority=priorities.get(title, 0)) for title in titles]


def spread_priorities(count: int) -> list[int]:
    """Ranks columns of a series, so that those left over span it: the ends are always shown."""
    return [
        0 if at in {0, count - 1} else 3 if at % 2 else 2 if at % 4 else 1 for at in range(count)
    ]


def moment_text(seconds: float, form: str = DATE_AND_TIME, *, utc: bool = False) -> str:
    """Formats Unix seconds by this machine's zone, or in UTC; "-" for what is no moment.

    form: of `strftime`.
    """
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
        return (moment if utc else moment.astimezone()).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "-"
