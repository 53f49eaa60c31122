"""Checks what Redis answers, at the one place where it enters.

Redis holds what anybody with its password has written, and answers in bytes.  A reply of another
shape than its command has raises one of MALFORMED, which the caller turns into a
StoreUnavailableError.  An entry in a reply is decoded on its own, so that one that cannot be read
spoils no other.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from redis._parsers import _AsyncRESP2Parser

# Bytes of one reply; the scripts of this package answer with far less.
REPLY_BYTES_MAX: Final = 24 * 1024 * 1024
# What an element of a reply takes in memory at least, in bytes.
_ELEMENT_BYTES: Final = 64
# Whole numbers up to here are exact in Lua, whose numbers are doubles.
NUMBER_MAX: Final = 2**53
# Unix seconds at the end of the year 9999: later times cannot be shown.
TIME_MAX: Final = 253_402_300_799.0


class BoundedParser(_AsyncRESP2Parser):
    """Refuses a reply that is too large, before it is held in memory."""

    _left = REPLY_BYTES_MAX

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Reads one reply.  Raises ValueError for one that is too large."""
        self._left = REPLY_BYTES_MAX
        return await super().read_response(disable_decoding)

    async def _read(self, length: int) -> bytes:
        self._take(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        self._take(_ELEMENT_BYTES)
        return await super()._readline()

    def _take(self, size: int) -> None:
        self._left -= size
        if size < 0 or self._left < 0:
            raise ValueError("the reply is too large")


def text_of(reply: Any) -> str:
    """Decodes a text in UTF-8.  Raises one of MALFORMED."""
    if not isinstance(reply, bytes):
        raise TypeError(f"a text is needed, not {type(reply).__name__}")
    return reply.decode()


def shown(reply: Any, most: int = 64) -> str:
    """A reply in printable ASCII, for people, cut to about so many characters.

    In anything but plain text there is a backslash.
    """
    text = reply[:most].decode("latin-1") if isinstance(reply, bytes) else repr(reply)[:most]
    return text.encode("unicode_escape").decode()


def number_of(reply: Any) -> int:
    """Reads an integer, which scripts also give as a text.  Raises one of MALFORMED."""
    found = int(reply) if isinstance(reply, bytes) else reply
    if type(found) is not int or abs(found) > NUMBER_MAX:
        raise ValueError("a whole number is needed")
    return found


def list_of(reply: Any, length: int | None = None) -> list[Any]:
    """A list, of so many elements if a length is given.  Raises one of MALFORMED."""
    if not isinstance(reply, list) or length not in {None, len(reply)}:
        raise TypeError("a list of another length is needed")
    return reply


def rows_of(reply: Any, width: int) -> Sequence[tuple[Any, ...]]:
    """Divides a flat list into rows.  Raises one of MALFORMED."""
    flat = list_of(reply)
    return list(zip(*(flat[column::width] for column in range(width)), strict=True))


def time_of(value: Any) -> float:
    """Checks Unix seconds from JSON.  Raises one of MALFORMED."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a time is needed")
    if not (math.isfinite(value) and 0 <= value <= TIME_MAX):
        raise ValueError("a time up to the year 9999 is needed")
    return float(value)


def nothing(reply: Any) -> None:
    """Takes any reply: its command is only sent for its effect."""
    del reply
