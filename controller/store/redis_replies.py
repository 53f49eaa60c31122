"""Checks and decodes the replies of Redis.

Any client with the password can write to Redis, so its data is not trusted.  A reply of an
unexpected shape raises one of MALFORMED, which the caller turns into a StoreUnavailableError.  Each
entry of a reply is decoded separately, so that an unreadable one does not affect the others.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from redis._parsers import _AsyncRESP2Parser

# Bytes of one reply; the scripts of this package return far less.
REPLY_BYTES_MAX: Final = 24 * 1024 * 1024
# Least memory of an element of a reply, in bytes.
_ELEMENT_BYTES: Final = 64
# Integers up to this one are exact in Lua, whose numbers are doubles.
NUMBER_MAX: Final = 2**53
# Unix seconds at the end of the year 9999: later times cannot be shown.
TIME_MAX: Final = 253_402_300_799.0


class BoundedParser(_AsyncRESP2Parser):
    """Refuses a reply that is too large before it is in memory."""

    _remaining_bytes = REPLY_BYTES_MAX

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Reads one reply.  Raises ValueError for one that is too large."""
        self._remaining_bytes = REPLY_BYTES_MAX
        return await super().read_response(disable_decoding)

    async def _read(self, length: int) -> bytes:
        self._consume(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        self._consume(_ELEMENT_BYTES)
        return await super()._readline()

    def _consume(self, size: int) -> None:
        self._remaining_bytes -= size
        if size < 0 or self._remaining_bytes < 0:
            raise ValueError("the reply is too large")


def decode_text(reply: Any) -> str:
    """Decodes a text in UTF-8.  Raises one of MALFORMED."""
    if not isinstance(reply, bytes):
        raise TypeError(f"must be a text, not {type(reply).__name__}")
    return reply.decode()


def to_printable(reply: Any, length_max: int = 64) -> str:
    """Returns a reply in printable ASCII, for people, cut to about `length_max` characters.

    Other characters are escaped with a backslash.
    """
    text = (
        reply[:length_max].decode("latin-1")
        if isinstance(reply, bytes)
        else repr(reply)[:length_max]
    )
    return text.encode("unicode_escape").decode()


def decode_integer(reply: Any) -> int:
    """Decodes an integer, which scripts may return as a text.  Raises one of MALFORMED."""
    number = int(reply) if isinstance(reply, bytes) else reply
    if type(number) is not int or abs(number) > NUMBER_MAX:
        raise ValueError("must be an integer")
    return number


def require_list(reply: Any, length: int | None = None) -> list[Any]:
    """Checks that a reply is a list, of this length if one is given.  Raises one of MALFORMED."""
    if not isinstance(reply, list) or length not in {None, len(reply)}:
        raise TypeError("must be a list" if length is None else f"must be a list of {length}")
    return reply


def split_rows(reply: Any, width: int) -> Sequence[tuple[Any, ...]]:
    """Splits a flat list into rows.  Raises one of MALFORMED."""
    flat = require_list(reply)
    return list(zip(*(flat[column::width] for column in range(width)), strict=True))


def require_time(value: Any) -> float:
    """Checks Unix seconds from JSON.  Raises one of MALFORMED."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("must be a time")
    if not (math.isfinite(value) and 0 <= value <= TIME_MAX):
        raise ValueError("must be a time up to the year 9999")
    return float(value)


def ignore_reply(reply: Any) -> None:
    """Ignores the reply of a command that is only sent for its effect."""
    del reply
