"""Makes words of others harmless to whoever prints them.

Control characters command a terminal, and characters that turn the direction of text show something
else than what is there.  Python's `str.isprintable` is false for all of them, and for line
separators and half characters.
"""

import re
from typing import Final

# Printable text has none of these; \n stands between lines.
_CANDIDATES: Final = re.compile(r"[^\n -~]")


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
