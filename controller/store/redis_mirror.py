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

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.interface import Entry, require_text
from controller.store.redis_replies import (
    NUMBER_MAX,
    decode_integer,
    decode_text,
    require_list,
    require_time,
    split_rows,
    to_printable,
)
from controller.util.files import remove_partial_files, write_atomically

# Longest id of an override (`controller.core.planning.overrides`).
_ID_CHARACTERS_MAX: Final = 128

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MirroredEntry:
    """A copy of an entry.  expires_at: monotonic seconds of its end, inf if it has none."""

    override_id: str
    revision: int
    body: str
    expires_at: float
    created_at: float
    ended: str

    @classmethod
    def from_redis(cls, override_id: str, text: Any, remaining_ms: Any, now: float) -> Self:
        """Decodes an entry's JSON in Redis.  remaining_ms: its time to live; below 0: no end.

        Raises one of MALFORMED.
        """
        return cls.from_json(override_id, json.loads(decode_text(text)), remaining_ms, now)

    @classmethod
    def from_json(
        cls, override_id: str, values: Mapping[str, Any], remaining_ms: Any, now: float
    ) -> Self:
        """Does the same with parsed JSON, with the keys of Redis or of `to_seed`."""
        ms = decode_integer(remaining_ms)
        return cls(
            override_id, _revision(values["revision"]), require_text(values["body"]),
            math.inf if ms < 0 else now + ms / 1000, require_time(values["created"]),
            require_text(values["ended"]),
        )  # fmt: skip

    def remaining_seconds(self, now: float) -> float:
        """Returns the seconds until its end."""
        return self.expires_at - now

    def has_expired(self, now: float) -> bool:
        """Returns whether it has expired."""
        return self.expires_at <= now

    def to_entry(self, now: float) -> Entry:
        """Returns this entry as the store interface defines it."""
        seconds = None if math.isinf(self.expires_at) else max(0.0, self.remaining_seconds(now))
        return Entry(
            self.override_id, self.revision, self.body, seconds, self.created_at, self.ended
        )  # fmt: skip

    def to_seed(self, now: float) -> dict[str, Any]:
        """Returns the values that restore the entry in a Redis that has lost it."""
        return {
            "id": self.override_id,
            "revision": self.revision,
            "body": self.body,
            "created": self.created_at,
            "ended": self.ended,
            # A value below 0 would mean no end.
            "ms": -1
            if math.isinf(self.expires_at)
            else max(0, round(1000 * self.remaining_seconds(now))),
        }


@dataclass(frozen=True, slots=True)
class FetchedEntries:
    """The entries in Redis.

    write_fault: why Redis cannot be written, "" if it can.  counter: its raw value.  left_out:
    numbers of live entries and of tombstones that one call does not return.  unreadable: printable
    ids of unreadable entries; if there are many, only some.  unreadable_count: number of all of
    them.
    """

    write_fault: str
    counter: bytes
    left_out: tuple[int, int]
    entries: dict[str, MirroredEntry]
    unreadable: tuple[str, ...]
    unreadable_count: int

    @classmethod
    def from_reply(cls, reply: Any) -> Self:
        """Decodes the reply of the script FETCH.  Raises one of MALFORMED."""
        now = time.monotonic()
        wrong, counter, live, ended, count, names, flat = require_list(reply, 7)
        unreadable = [_printable_id(name) for name in require_list(names)]
        unnamed_count = decode_integer(count) - len(unreadable)
        entries = {}
        for name, text, remaining_ms in split_rows(flat, 3):
            try:
                override_id = decode_text(name)
                entries[override_id] = MirroredEntry.from_redis(
                    override_id, text, remaining_ms, now
                )
            except MALFORMED_JSON_ERRORS:
                unreadable.append(_printable_id(name))
        if not isinstance(counter, bytes):
            raise TypeError("the counter must be a text")
        return cls(
            decode_text(wrong), counter, (decode_integer(live), decode_integer(ended)), entries,
            tuple(unreadable), unnamed_count + len(unreadable),
        )  # fmt: skip


class RedisMirror:
    """Reads and writes the mirror file, with wall-clock times of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, entries: dict[str, MirroredEntry]) -> None:
        """Replaces the mirror file.  If it cannot be written, only logs this."""
        now, wall = time.monotonic(), time.time()
        body = json.dumps(
            {"at": wall, "entries": [entry.to_seed(now) for entry in entries.values()]}
        ).encode()
        check = hashlib.sha256(body).hexdigest().encode()
        try:
            write_atomically(self._path, check + b"\n" + body)
        except OSError as error:
            _log.warning("mirror_not_written", path=str(self._path), error=error.strerror)

    def read(self) -> tuple[dict[str, MirroredEntry], float]:
        """Returns the entries that have not expired, and the seconds since the file was written."""
        try:
            remove_partial_files(self._path.parent)
            return self._parse()
        except FileNotFoundError:
            return {}, 0.0
        except (OSError, *MALFORMED_JSON_ERRORS) as error:
            _log.warning("mirror_not_read", path=str(self._path), error=str(error))
            return {}, 0.0

    def _parse(self) -> tuple[dict[str, MirroredEntry], float]:
        check, _, body = self._path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != check:
            raise ValueError("its checksum is wrong")
        values = json.loads(body)
        unconfirmed_seconds, now = time.time() - require_time(values["at"]), time.monotonic()
        if unconfirmed_seconds < 0:
            _log.warning(
                "clock_went_back", path=str(self._path), seconds=round(-unconfirmed_seconds),
                effect="overrides get the time that they had left when the mirror was written",
            )  # fmt: skip
            unconfirmed_seconds = 0.0
        entries = [
            MirroredEntry.from_json(
                require_text(item["id"]), item, item["ms"], now - unconfirmed_seconds
            )
            for item in values["entries"]
        ]
        return {
            entry.override_id: entry for entry in entries if not entry.has_expired(now)
        }, unconfirmed_seconds


def _printable_id(name: Any) -> str:
    """Returns a printable id, in full if it can be an override's, so that it can be cleared."""
    return to_printable(name, _ID_CHARACTERS_MAX)


def _revision(value: Any) -> int:
    # Lua writes large integers with an exponent.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("a revision must be an integer")
    if not 0 <= value < NUMBER_MAX:
        raise ValueError("a revision must be in [0, 2^53)")
    return int(value)
