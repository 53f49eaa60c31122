"""The default store: one directory on this machine, for one sidecar.

    overrides.db   entries and the audit of every change (`database`)
    lock           held by the sidecar that uses the directory
    shelf/         profiles and estimates, `<kind>/<name>/<source>.json`

The entries are held in memory as well; the database makes them durable.  Writes and reads of the
audit have a thread each, so that a long audit delays no override.

Ends are wall-clock seconds of this machine, because the database is read again after a restart.
While the store is open, time advances by the monotonic clock.  If an entry was created later than
the time at the start, the clock went back: its time to live then starts again.
"""

import asyncio
import dataclasses
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from controller.core.errors import MALFORMED
from controller.store.database import Database, StoredEntry, refuse_links
from controller.store.interface import (
    BLOB_NAMES,
    LIVE_ENTRIES_MAX,
    TOMBSTONE_SECONDS,
    Actor,
    AuditRecord,
    Blob,
    BlobKind,
    ConflictError,
    Entry,
    Health,
    Listener,
    SkippedEntries,
    StoreError,
    StoreFullError,
    StoreTakenError,
    StoreUnavailableError,
    SummaryBoard,
    UnknownSequenceError,
    text_from_json,
)
from controller.util.files import remove_unfinished, write_whole
from controller.util.tasks import Work

_SIDECAR = Actor("", "its time was up", "sidecar")

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class FileStore:
    """Implements Store in a directory; see the module.  wall: returns Unix seconds."""

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._wall = wall
        self._skipped = SkippedEntries(str(directory))
        self.blobs = FileBlobStore(directory / "shelf", wall, self._skipped)
        # The directory belongs to one sidecar.
        self.summaries: SummaryBoard | None = None
        # Wall time minus monotonic time when the store was opened.
        self._offset = 0.0
        self._lock_file: int | None = None
        self._database: Database | None = None
        self._held: dict[str, StoredEntry] = {}
        self._sequence = 0
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._trouble = ""
        self._since = time.monotonic()
        self._writing = ThreadPoolExecutor(1, "store-write")
        self._reading = ThreadPoolExecutor(1, "store-read")
        self._closed = False

    async def open(self, changed: Listener) -> None:
        """Opens the directory.  Raises StoreTakenError, StoreBrokenError, StoreUnavailableError."""
        del changed  # this sidecar is the only writer
        await self._in(self._writing, self._open)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _now(self) -> float:
        """Returns the wall time, not affected by clock steps since the opening."""
        return time.monotonic() + self._offset

    def _open(self) -> None:
        self._offset = self._wall() - time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock()
            remove_unfinished(self._directory)
            self._database = Database(self._directory / "overrides.db")
            self._sequence = self._database.last_sequence
            self._load(self._database)
        except OSError as error:
            self._shut()
            raise StoreUnavailableError(f"{self._directory}: {error.strerror}") from error
        except BaseException:
            self._shut()
            raise

    def _lock(self) -> None:
        path = self._directory / "lock"
        refuse_links(path)
        self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreTakenError(
                f"{self._directory} is in use by another sidecar: give each its own directory"
            ) from error

    def _load(self, database: Database) -> None:
        """Loads the entries, and redates those from the future."""
        now = self._now()
        stored = database.entries()
        moved = [_moved_back(entry, now) for entry in stored if entry.created_at > now]
        self._held = {entry.override_id: entry for entry in (*stored, *moved)}
        if not moved:
            return
        _log.warning(
            "clock_went_back",
            seconds=round(max(entry.created_at for entry in stored) - now),
            overrides=[entry.override_id for entry in moved if not entry.ended],
            effect="these overrides get the time to live that they were granted, from now on",
        )
        try:
            database.replace(moved)
        except StoreUnavailableError as error:
            # The correction applies in memory; the next start repeats it.
            _log.warning("clock_not_corrected", error=str(error))

    @property
    def tasks(self) -> Mapping[str, Work]:
        """Returns no tasks: the sidecar that opens the directory is its only writer."""
        return {}

    async def close(self) -> None:
        """Waits for running changes, and closes the store.  It cannot be opened again."""
        await asyncio.gather(*self._changes, return_exceptions=True)
        async with self._one_at_a_time:
            if self._closed:
                return
            self._closed = True
            await self._in(self._reading, lambda: None)
            await self._in(self._writing, self._shut)
            self._reading.shutdown()
            self._writing.shutdown()

    def _shut(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def entries(self) -> Sequence[Entry]:
        """Returns all entries.  Ends expired ones even if that cannot be written."""
        async with self._one_at_a_time:
            now = self._now()
            for held in list(self._held.values()):
                if held.over(now):
                    await self._run_out(held, now)
            return [held.entry(now) for held in self._held.values()]

    async def _run_out(self, held: StoredEntry, now: float) -> None:
        if held.ended:
            del self._held[held.override_id]
            return
        after = self._next(held.override_id, "", TOMBSTONE_SECONDS, now, "expired")
        try:
            await self._commit("expire", after, held, _SIDECAR)
        except StoreError:
            # The database still has its end, so the next start expires it again.
            self._held[held.override_id] = after

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Actor
    ) -> Entry:
        """Implements the method of the store interface."""
        return await self._finished(self._change(override_id, body, seconds, expected, who))

    async def clear(self, override_id: str, expected: int, who: Actor) -> Entry:
        """Implements the method of the store interface."""
        return await self._finished(self._change(override_id, "", TOMBSTONE_SECONDS, expected, who))

    async def record(self, action: str, subject: str, who: Actor) -> None:
        """Implements the method of the store interface."""
        await self._finished(self._note(action, subject, who))

    async def _note(self, action: str, subject: str, who: Actor) -> None:
        async with self._one_at_a_time:
            sequence = self._sequence + 1
            record = AuditRecord(
                str(sequence), self._now(), action, subject, who.author, who.reason, who.origin,
                "", "",
            )  # fmt: skip
            await self._written(lambda: self._opened().note(record))
            self._sequence = sequence

    async def _finished(self, change: Coroutine[Any, Any, _T]) -> _T:
        # A change that has started is completed even if its caller is cancelled.
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Actor
    ) -> Entry:
        async with self._one_at_a_time:
            now = self._now()
            before = self._expect(override_id, expected, now)
            if body and (before is None or before.ended):
                self._require_room(now)
            after = self._next(override_id, body, seconds, now, "" if body else "cleared")
            action = "clear" if not body else "replace" if before else "set"
            await self._commit(action, after, before, who)
            return after.entry(now)

    def _expect(self, override_id: str, expected: int, now: float) -> StoredEntry | None:
        found = self._held.get(override_id)
        if (found.revision if found else 0) != expected:
            raise ConflictError(override_id, expected, found.entry(now) if found else None)
        return found

    def _require_room(self, now: float) -> None:
        live = sum(not held.ended and not held.over(now) for held in self._held.values())
        if live >= LIVE_ENTRIES_MAX:
            raise StoreFullError(live)

    def _next(
        self, override_id: str, body: str, seconds: float | None, now: float, ended: str
    ) -> StoredEntry:
        """Makes an entry; its revision is the sequence of its audit record."""
        until = None if seconds is None else now + seconds
        return StoredEntry(override_id, self._sequence + 1, body, until, now, ended)

    async def _commit(
        self, action: str, after: StoredEntry, before: StoredEntry | None, who: Actor
    ) -> None:
        record = AuditRecord(
            str(after.revision), after.created_at, action, after.override_id, who.author,
            who.reason, who.origin, before.body if before else "", after.body,
        )  # fmt: skip
        await self._written(lambda: self._opened().change(after, record))
        self._held[after.override_id] = after
        self._sequence = after.revision

    async def _written(self, work: Callable[[], None]) -> None:
        """Runs `work` on the writing thread; `health` reports whether the last write succeeded."""
        try:
            await self._in(self._writing, work)
        except StoreError as error:
            if not self._trouble:
                self._since = time.monotonic()
            self._trouble = str(error)
            raise
        if self._trouble:
            self._trouble, self._since = "", time.monotonic()

    def _opened(self) -> Database:
        if self._database is None:
            raise StoreUnavailableError("the store is closed; nothing was changed")
        return self._database

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """Implements the method of the store interface; sequences are numbers."""
        if before and not before.isdecimal():
            raise UnknownSequenceError(
                f"sequence {before[:40]!r} is not from this store", field_path="before_sequence"
            )
        older_than = int(before) if before else None
        alone = self._opened().alone
        return await self._in(
            self._writing if alone else self._reading,
            lambda: self._opened().audit(limit, subject, older_than),
        )

    @property
    def health(self) -> Health:
        """Returns the state; not ok if the database cannot be written."""
        detail = self._trouble or f"file store in {self._directory}"
        return Health(
            not self._trouble, detail, time.monotonic() - self._since,
            skipped=dict(self._skipped.counts),
        )  # fmt: skip


def _moved_back(entry: StoredEntry, now: float) -> StoredEntry:
    """Redates an entry as if it had been created now."""
    until = None if entry.until is None else now + (entry.until - entry.created_at)
    return dataclasses.replace(entry, until=until, created_at=now)


class FileBlobStore:
    """Keeps blobs in files.

    Times are wall-clock seconds of this machine, because files are read again after a restart.
    """

    def __init__(
        self,
        directory: Path,
        wall: Callable[[], float] = time.time,
        skipped: SkippedEntries | None = None,
    ) -> None:
        self._directory = directory
        self._skipped = skipped or SkippedEntries(str(directory))
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Implements the method of the store interface."""
        async with self._one_at_a_time:
            await self._run(lambda: self._put(kind, name, source, text))

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Implements the store interface; counts and skips unreadable files."""
        return await self._run(lambda: [item for item, _ in self._items(kind, name)])

    async def names(self, kind: BlobKind) -> Sequence[str]:
        """Implements the method of the store interface."""
        return await self._run(lambda: [path.name for path in self._names(kind)])

    async def _run(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise StoreUnavailableError(f"{self._directory}: {error.strerror}") from error

    def _put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        folder = self._directory / kind.name / name
        body = json.dumps({"at": self._wall(), "text": text})
        write_whole(folder / f"{source}.json", body.encode())
        os.utime(folder)
        for _, path in self._items(kind, name)[kind.sources :]:
            path.unlink(missing_ok=True)
        for old in self._names(kind)[BLOB_NAMES:]:
            shutil.rmtree(old, ignore_errors=True)

    def _names(self, kind: BlobKind) -> list[Path]:
        folder = self._directory / kind.name
        if not folder.is_dir():
            return []
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)

    def _items(self, kind: BlobKind, name: str) -> list[tuple[Blob, Path]]:
        now, found = self._wall(), []
        for path in (self._directory / kind.name / name).glob("*.json"):
            try:
                body = json.loads(path.read_bytes())
                text, at = text_from_json(body["text"]), float(body["at"])
                if not math.isfinite(at):
                    raise ValueError("must be a time")
                item = Blob(path.stem, text, max(0.0, now - at))
            except (OSError, *MALFORMED) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._skipped.add(kind.name, [f"{name}/{path.name}"], reason or "")
                continue
            if kind.seconds is None or item.age_seconds < kind.seconds:
                found.append((item, path))
            else:
                path.unlink(missing_ok=True)
        return sorted(found, key=lambda pair: pair[0].age_seconds)
