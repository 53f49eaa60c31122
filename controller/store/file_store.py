"""The default store: one directory on this machine, for one sidecar.

The journal of changes is the truth: it is the audit, and replayed it gives the entries.  At a start
it is cut down to what is held and the newest records, when it has many more.  Times are kept as
wall-clock seconds of this machine, because a journal is read again after a restart; while a store
is open they run by the monotonic clock.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from controller.core.errors import MALFORMED
from controller.store.file_shelf import FileShelf
from controller.store.journal import Journal
from controller.store.port import (
    TRACE_SECONDS,
    AuditRecord,
    ConflictError,
    Entry,
    Health,
    Listener,
    StoreBrokenError,
    StoreTakenError,
    StoreUnavailableError,
    UnknownSequenceError,
    Who,
)
from controller.whole_file import remove_unfinished

# Records of the audit that a start keeps; it cuts when there are twice as many.
AUDIT_KEPT: Final = 20_000

_SIDECAR = Who("", "its time was up", "sidecar")

_log = structlog.get_logger(__name__)


class FileStore:
    """See the module.  wall: the clock that times are kept in, Unix seconds."""

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._wall = wall
        self.shelf = FileShelf(directory / "shelf", wall)
        # Wall time less monotonic time, as it was when the store was opened.
        self._offset = 0.0
        self._lock_file: int | None = None
        self._journal: Journal | None = None
        self._held: dict[str, _Held] = {}
        self._revision = 0
        self._sequence = 0
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[Entry]] = set()
        self._trouble = ""
        self._since = time.monotonic()

    async def open(self, changed: Listener) -> None:
        """Raises StoreTakenError, StoreBrokenError, StoreUnavailableError."""
        del changed  # nobody else writes here
        await asyncio.to_thread(self._open)

    def _now(self) -> float:
        """Wall time as at the opening, and steady since: a clock that is set moves no end."""
        return time.monotonic() + self._offset

    def _open(self) -> None:
        self._offset = self._wall() - time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock_file = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o640)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise StoreTakenError(
                f"{self._directory} is in use by another sidecar: give each its own directory"
            ) from error
        except OSError as error:
            self._unlock()
            raise StoreUnavailableError(f"{self._directory}: {error.strerror}") from error
        try:
            remove_unfinished(self._directory)
            self._journal = Journal(self._directory / "overrides.journal")
            count = 0
            for record in self._journal.records():
                _audit(record)
                self._replay(record)
                count += 1
            if count > 2 * AUDIT_KEPT:
                self._cut(self._journal, count - AUDIT_KEPT)
        except OSError as error:
            self._shut()
            raise StoreUnavailableError(f"{self._directory}: {error.strerror}") from error
        except MALFORMED as error:
            self._shut()
            raise StoreBrokenError(
                f"{self._directory / 'overrides.journal'}: a record that is none: {error!r}"
            ) from error
        except BaseException:
            self._shut()
            raise

    def _cut(self, journal: Journal, old: int) -> None:
        """Leaves out those of the first `old` records that nothing comes of any more."""
        now = self._now()
        held = {h.revision for h in self._held.values() if h.until is None or h.until > now}
        kept = [
            record
            for number, record in enumerate(journal.records(), 1)
            if number > old or record["revision"] in held
        ]
        try:
            journal.rewrite(kept)
        except OSError as error:
            # A full disk, say: a long journal is as good.
            _log.warning("journal_not_cut", path=str(self._directory), error=error.strerror)

    async def close(self) -> None:
        """Waits for changes under way."""
        await asyncio.gather(*self._changes, return_exceptions=True)
        async with self._one_at_a_time:
            self._shut()

    def _shut(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def entries(self) -> Sequence[Entry]:
        """Ends what has run out by now, also when that cannot be written down."""
        async with self._one_at_a_time:
            now = self._now()
            for held in list(self._held.values()):
                if held.until is not None and held.until <= now:
                    await self._run_out(held, now)
            return [held.entry(now) for held in self._held.values()]

    async def _run_out(self, held: "_Held", now: float) -> None:
        if held.ended:
            del self._held[held.override_id]
            return
        after = self._next(held.override_id, "", TRACE_SECONDS, now, "expired")
        try:
            await self._commit("expire", after, held, _SIDECAR, now)
        except StoreUnavailableError:
            # The journal says until when it was for; replaying it will end it again.
            self._held[held.override_id] = after

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Who
    ) -> Entry:
        """See the port."""
        return await self._finished(self._change(override_id, body, seconds, expected, who))

    async def clear(self, override_id: str, expected: int, who: Who) -> Entry:
        """See the port."""
        return await self._finished(self._change(override_id, "", TRACE_SECONDS, expected, who))

    async def _finished(self, change: Coroutine[Any, Any, Entry]) -> Entry:
        # A change that has begun is finished, even when whoever asked for it goes away.
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Who
    ) -> Entry:
        async with self._one_at_a_time:
            now = self._now()
            before = self._expect(override_id, expected, now)
            after = self._next(override_id, body, seconds, now, "" if body else "cleared")
            action = "clear" if not body else "replace" if before else "set"
            await self._commit(action, after, before, who, now)
            return after.entry(now)

    def _expect(self, override_id: str, expected: int, now: float) -> "_Held | None":
        found = self._held.get(override_id)
        if (found.revision if found else 0) != expected:
            raise ConflictError(
                f"override {override_id!r} is not at revision {expected}",
                found.entry(now) if found else None,
            )
        return found

    def _next(
        self, override_id: str, body: str, seconds: float | None, now: float, ended: str
    ) -> "_Held":
        until = None if seconds is None else now + seconds
        return _Held(override_id, self._revision + 1, body, until, now, ended)

    async def _commit(
        self, action: str, after: "_Held", before: "_Held | None", who: Who, now: float
    ) -> None:
        record = {
            "sequence": self._sequence + 1,
            "at": now,
            "action": action,
            "author": who.author,
            "reason": who.reason,
            "origin": who.origin,
            "before": before.body if before else "",
            **after.record(),
        }
        try:
            await asyncio.to_thread(self._append, record)
        except StoreUnavailableError as error:
            if not self._trouble:
                self._since = time.monotonic()
            self._trouble = str(error)
            raise
        if self._trouble:
            self._trouble, self._since = "", time.monotonic()
        self._replay(record)

    def _append(self, record: dict[str, Any]) -> None:
        if self._journal is None:
            raise StoreUnavailableError("the store is closed")
        self._journal.append(record)

    def _replay(self, record: dict[str, Any]) -> None:
        held = _Held.of(record)
        if held.ended != _NOTED:
            self._held[held.override_id] = held
        self._revision = max(self._revision, held.revision)
        self._sequence = int(record["sequence"])

    async def record(self, action: str, subject: str, who: Who) -> None:
        """See the port."""

        async def change() -> Entry:
            async with self._one_at_a_time:
                now = self._now()
                # The form of an entry that has run out already, so that an older sidecar, which
                # knows no other records, reads the journal as well.
                noted = _Held(subject, self._revision, "", now, now, _NOTED)
                await self._commit(action, noted, None, who, now)
                return noted.entry(now)

        await self._finished(change())

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """See the port; sequences are numbers."""
        if before and not before.isdecimal():
            raise UnknownSequenceError(f"sequence {before[:40]!r} is none of this store")
        oldest = int(before) if before else self._sequence + 1

        def read() -> list[AuditRecord]:
            if self._journal is None:
                raise StoreUnavailableError("the store is closed")
            found = [
                _audit(record)
                for record in self._journal.records()
                if record["sequence"] < oldest and subject in {"", record["override_id"]}
            ]
            return found[: -limit - 1 : -1]

        return await asyncio.to_thread(read)

    @property
    def health(self) -> Health:
        """Trouble is a journal that cannot be written."""
        detail = self._trouble or f"file store in {self._directory}"
        return Health(not self._trouble, detail, time.monotonic() - self._since)


# Stands where others say how an entry ended: the record is of no entry.
_NOTED = "noted"


class _Held:
    """An entry with its end as a point in wall time."""

    __slots__ = ("body", "created_at", "ended", "override_id", "revision", "until")

    def __init__(
        self,
        override_id: str,
        revision: int,
        body: str,
        until: float | None,
        created_at: float,
        ended: str,
    ) -> None:
        self.override_id, self.revision, self.body = override_id, revision, body
        self.until, self.created_at, self.ended = until, created_at, ended

    @classmethod
    def of(cls, record: dict[str, Any]) -> "_Held":
        until = record["until"]
        return cls(
            str(record["override_id"]),
            int(record["revision"]),
            str(record["body"]),
            None if until is None else float(until),
            float(record["at"]),
            str(record["ended"]),
        )

    def record(self) -> dict[str, Any]:
        return {
            "override_id": self.override_id,
            "revision": self.revision,
            "body": self.body,
            "until": self.until,
            "ended": self.ended,
        }

    def entry(self, now: float) -> Entry:
        remaining = None if self.until is None else max(0.0, self.until - now)
        return Entry(
            self.override_id, self.revision, self.body, remaining, self.created_at, self.ended
        )


def _audit(record: dict[str, Any]) -> AuditRecord:
    """Raises one of MALFORMED for what is none."""
    texts = ("action", "override_id", "author", "reason", "origin", "before", "body")
    return AuditRecord(
        str(int(record["sequence"])), float(record["at"]), *(_text(record[name]) for name in texts)
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is needed, not a {type(value).__name__}")
    value.encode()  # half a character can stand in JSON, and nowhere else
    return value
