"""A sidecar's local copy of the entries in Redis; they expire by its own monotonic clock.

The mirror file keeps the copy over a restart.  It is written atomically, with a checksum.  A
damaged file is ignored, because Redis is authoritative.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import structlog

from controller.core.errors import MALFORMED
from controller.store.interface import Entry, text_from_json
from controller.store.redis_replies import (
    NUMBER_MAX,
    list_of,
    number_of,
    rows_of,
    shown,
    text_of,
    time_of,
)
from controller.util.files import remove_unfinished, write_whole

# Longest id of an override (`controller.core.planning.overrides`).
_ID_CHARACTERS_MAX: Final = 128

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MirroredEntry:
    """A copy of an entry.  until: monotonic seconds of its end, inf if it has none."""

    override_id: str
    revision: int
    body: str
    until: float
    created_at: float
    ended: str

    @classmethod
    def of(cls, override_id: str, text: Any, left: Any, now: float) -> Self:
        """Decodes an entry's JSON in Redis.  left: its milliseconds to live; below 0: no end.

        Raises one of MALFORMED.
        """
        return cls.made(override_id, json.loads(text_of(text)), left, now)

    @classmethod
    def made(cls, override_id: str, found: Mapping[str, Any], left: Any, now: float) -> Self:
        """Does the same with parsed JSON, with the keys of Redis or of `seed`."""
        ms = number_of(left)
        return cls(
            override_id, _revision(found["revision"]), text_from_json(found["body"]),
            math.inf if ms < 0 else now + ms / 1000, time_of(found["created"]),
            text_from_json(found["ended"]),
        )  # fmt: skip

    def left(self, now: float) -> float:
        """Returns the seconds until its end."""
        return self.until - now

    def over(self, now: float) -> bool:
        """Returns whether it has expired."""
        return self.until <= now

    def entry(self, now: float) -> Entry:
        """Returns this entry as the store interface defines it."""
        left = None if math.isinf(self.until) else max(0.0, self.left(now))
        return Entry(
            self.override_id, self.revision, self.body, left, self.created_at, self.ended
        )  # fmt: skip

    def seed(self, now: float) -> dict[str, Any]:
        """Returns the values that restore the entry in a Redis that has lost it."""
        return {
            "id": self.override_id,
            "revision": self.revision,
            "body": self.body,
            "created": self.created_at,
            "ended": self.ended,
            # A value below 0 would mean no end.
            "ms": -1 if math.isinf(self.until) else max(0, round(1000 * self.left(now))),
        }


@dataclass(frozen=True, slots=True)
class Fetched:
    """The entries in Redis.

    wrong: why Redis cannot be written, "" if it can.  counter: its raw value.  left_out: numbers of
    live entries and of tombstones that one call does not return.  unreadable: printable ids of
    unreadable entries; if there are many, only some.  unreadable_count: number of all of them.
    """

    wrong: str
    counter: bytes
    left_out: tuple[int, int]
    entries: dict[str, MirroredEntry]
    unreadable: tuple[str, ...]
    unreadable_count: int

    @classmethod
    def of(cls, reply: Any) -> Self:
        """Decodes the reply of the script FETCH.  Raises one of MALFORMED."""
        now = time.monotonic()
        wrong, counter, live, ended, count, names, flat = list_of(reply, 7)
        unreadable = [_shown(name) for name in list_of(names)]
        bad = number_of(count) - len(unreadable)
        entries = {}
        for name, text, left in rows_of(flat, 3):
            try:
                override_id = text_of(name)
                entries[override_id] = MirroredEntry.of(override_id, text, left, now)
            except MALFORMED:
                unreadable.append(_shown(name))
        if not isinstance(counter, bytes):
            raise TypeError("the counter must be a text")
        return cls(
            text_of(wrong), counter, (number_of(live), number_of(ended)), entries,
            tuple(unreadable), bad + len(unreadable),
        )  # fmt: skip


class RedisMirror:
    """Reads and writes the mirror file, with wall-clock times of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entries: dict[str, MirroredEntry]) -> None:
        """Replaces the mirror file.  If it cannot be written, only logs this."""
        now, wall = time.monotonic(), time.time()
        body = json.dumps(
            {"at": wall, "entries": [held.seed(now) for held in entries.values()]}
        ).encode()
        check = hashlib.sha256(body).hexdigest().encode()
        try:
            write_whole(self._path, check + b"\n" + body)
        except OSError as error:
            _log.warning("mirror_not_written", path=str(self._path), error=error.strerror)

    def read(self) -> tuple[dict[str, MirroredEntry], float]:
        """Returns the entries that have not expired, and the seconds since the file was written."""
        try:
            remove_unfinished(self._path.parent)
            return self._parsed()
        except FileNotFoundError:
            return {}, 0.0
        except (OSError, *MALFORMED) as error:
            _log.warning("mirror_not_read", path=str(self._path), error=str(error))
            return {}, 0.0

    def _parsed(self) -> tuple[dict[str, MirroredEntry], float]:
        check, _, body = self._path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != check:
            raise ValueError("its checksum is wrong")
        found = json.loads(body)
        idle, now = time.time() - time_of(found["at"]), time.monotonic()
        if idle < 0:
            _log.warning(
                "clock_went_back", path=str(self._path), seconds=round(-idle),
                effect="overrides get the time that they had left when the mirror was written",
            )  # fmt: skip
            idle = 0.0
        entries = [
            MirroredEntry.made(text_from_json(item["id"]), item, item["ms"], now - idle)
            for item in found["entries"]
        ]
        return {held.override_id: held for held in entries if not held.over(now)}, idle


def _shown(name: Any) -> str:
    """Returns a printable id, in full if it can be an override's, so that it can be cleared."""
    return shown(name, _ID_CHARACTERS_MAX)


def _revision(value: Any) -> int:
    # Lua writes large integers with an exponent.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("a revision must be an integer")
    if not 0 <= value < NUMBER_MAX:
        raise ValueError("a revision must be in [0, 2^53)")
    return int(value)
