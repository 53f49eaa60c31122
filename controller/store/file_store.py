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

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.database import Database, StoredEntry, refuse_links
from controller.store.interface import (
    BLOB_NAMES_MAX,
    LIVE_ENTRIES_MAX,
    TOMBSTONE_SECONDS,
    Actor,
    AuditRecord,
    Blob,
    BlobKind,
    ChangeListener,
    ConflictError,
    Entry,
    Health,
    SkippedEntries,
    StoreError,
    StoreFullError,
    StoreTakenError,
    StoreUnavailableError,
    SummaryStore,
    UnknownSequenceError,
    require_text,
)
from controller.util.files import remove_partial_files, write_atomically
from controller.util.tasks import Work

_EXPIRY_ACTOR = Actor("", "its time was up", "sidecar")

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
        self.summaries: SummaryStore | None = None
        # Wall time minus monotonic time when the store was opened.
        self._offset = 0.0
        self._lock_file: int | None = None
        self._database: Database | None = None
        self._entries: dict[str, StoredEntry] = {}
        self._sequence = 0
        self._change_lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._fault = ""
        self._state_since = time.monotonic()
        self._writing = ThreadPoolExecutor(1, "store-write")
        self._reading = ThreadPoolExecutor(1, "store-read")
        self._closed = False

    async def open(self, changed: ChangeListener) -> None:
        """Opens the directory.  Raises StoreTakenError, StoreBrokenError, StoreUnavailableError."""
        del changed  # this sidecar is the only writer
        await self._run_on(self._writing, self._open)

    async def _run_on(self, thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _now(self) -> float:
        """Returns the wall time, not affected by clock steps since the opening."""
        return time.monotonic() + self._offset

    def _open(self) -> None:
        self._offset = self._wall() - time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock()
            remove_partial_files(self._directory)
            self._database = Database(self._directory / "overrides.db")
            self._sequence = self._database.last_sequence
            self._load(self._database)
        except OSError as error:
            self._close_files()
            raise StoreUnavailableError(f"{self._directory}: {error.strerror}") from error
        except BaseException:
            self._close_files()
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
        moved = [_redated(entry, now) for entry in stored if entry.created_at > now]
        self._entries = {entry.override_id: entry for entry in (*stored, *moved)}
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
        async with self._change_lock:
            if self._closed:
                return
            self._closed = True
            await self._run_on(self._reading, lambda: None)
            await self._run_on(self._writing, self._close_files)
            self._reading.shutdown()
            self._writing.shutdown()

    def _close_files(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def entries(self) -> Sequence[Entry]:
        """Returns all entries.  Ends expired ones even if that cannot be written."""
        async with self._change_lock:
            now = self._now()
            for entry in list(self._entries.values()):
                if entry.has_expired(now):
                    await self._expire(entry, now)
            return [entry.to_entry(now) for entry in self._entries.values()]

    async def _expire(self, entry: StoredEntry, now: float) -> None:
        if entry.ended:
            del self._entries[entry.override_id]
            return
        tombstone = self._next_entry(entry.override_id, "", TOMBSTONE_SECONDS, now, "expired")
        try:
            await self._commit("expire", tombstone, entry, _EXPIRY_ACTOR)
        except StoreError:
            # The database still has its end, so the next start expires it again.
            self._entries[entry.override_id] = tombstone

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, actor: Actor
    ) -> Entry:
        """Implements the method of the store interface."""
        return await self._run_to_completion(
            self._apply_change(override_id, body, seconds, expected, actor)
        )

    async def clear(self, override_id: str, expected: int, actor: Actor) -> Entry:
        """Implements the method of the store interface."""
        return await self._run_to_completion(
            self._apply_change(override_id, "", TOMBSTONE_SECONDS, expected, actor)
        )

    async def record(self, action: str, subject: str, actor: Actor) -> None:
        """Implements the method of the store interface."""
        await self._run_to_completion(self._add_record(action, subject, actor))

    async def _add_record(self, action: str, subject: str, actor: Actor) -> None:
        async with self._change_lock:
            sequence = self._sequence + 1
            record = AuditRecord(
                str(sequence), self._now(), action, subject, actor.author, actor.reason,
                actor.origin,
                "", "",
            )  # fmt: skip
            await self._write_to_database(lambda: self._open_database().add_record(record))
            self._sequence = sequence

    async def _run_to_completion(self, change: Coroutine[Any, Any, _T]) -> _T:
        # A change that has started is completed even if its caller is cancelled.
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _apply_change(
        self, override_id: str, body: str, seconds: float | None, expected: int, actor: Actor
    ) -> Entry:
        async with self._change_lock:
            now = self._now()
            previous = self._require_revision(override_id, expected, now)
            if body and (previous is None or previous.ended):
                self._require_room(now)
            changed = self._next_entry(override_id, body, seconds, now, "" if body else "cleared")
            action = "clear" if not body else "replace" if previous else "set"
            await self._commit(action, changed, previous, actor)
            return changed.to_entry(now)

    def _require_revision(self, override_id: str, expected: int, now: float) -> StoredEntry | None:
        entry = self._entries.get(override_id)
        if (entry.revision if entry else 0) != expected:
            raise ConflictError(override_id, expected, entry.to_entry(now) if entry else None)
        return entry

    def _require_room(self, now: float) -> None:
        live = sum(
            not entry.ended and not entry.has_expired(now) for entry in self._entries.values()
        )
        if live >= LIVE_ENTRIES_MAX:
            raise StoreFullError(live)

    def _next_entry(
        self, override_id: str, body: str, seconds: float | None, now: float, ended: str
    ) -> StoredEntry:
        """Makes an entry; its revision is the sequence of its audit record."""
        expires_at = None if seconds is None else now + seconds
        return StoredEntry(override_id, self._sequence + 1, body, expires_at, now, ended)

    async def _commit(
        self, action: str, changed: StoredEntry, previous: StoredEntry | None, actor: Actor
    ) -> None:
        record = AuditRecord(
            str(changed.revision), changed.created_at, action, changed.override_id, actor.author,
            actor.reason, actor.origin, previous.body if previous else "", changed.body,
        )  # fmt: skip
        await self._write_to_database(lambda: self._open_database().change(changed, record))
        self._entries[changed.override_id] = changed
        self._sequence = changed.revision

    async def _write_to_database(self, work: Callable[[], None]) -> None:
        """Runs `work` on the writing thread; `health` reports whether the last write succeeded."""
        try:
            await self._run_on(self._writing, work)
        except StoreError as error:
            if not self._fault:
                self._state_since = time.monotonic()
            self._fault = str(error)
            raise
        if self._fault:
            self._fault, self._state_since = "", time.monotonic()

    def _open_database(self) -> Database:
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
        is_single_connection = self._open_database().is_single_connection
        return await self._run_on(
            self._writing if is_single_connection else self._reading,
            lambda: self._open_database().audit(limit, subject, older_than),
        )

    @property
    def health(self) -> Health:
        """Returns the state; not ok if the database cannot be written."""
        detail = self._fault or f"file store in {self._directory}"
        return Health(
            not self._fault, detail, time.monotonic() - self._state_since,
            skipped=dict(self._skipped.counts),
        )  # fmt: skip


def _redated(entry: StoredEntry, now: float) -> StoredEntry:
    """Redates an entry as if it had been created now."""
    expires_at = None if entry.expires_at is None else now + (entry.expires_at - entry.created_at)
    return dataclasses.replace(entry, expires_at=expires_at, created_at=now)


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
        self._put_lock = asyncio.Lock()

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Implements the method of the store interface."""
        async with self._put_lock:
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
        write_atomically(folder / f"{source}.json", body.encode())
        os.utime(folder)
        for _, path in self._items(kind, name)[kind.sources :]:
            path.unlink(missing_ok=True)
        for old in self._names(kind)[BLOB_NAMES_MAX:]:
            shutil.rmtree(old, ignore_errors=True)

    def _names(self, kind: BlobKind) -> list[Path]:
        folder = self._directory / kind.name
        if not folder.is_dir():
            return []
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)

    def _items(self, kind: BlobKind, name: str) -> list[tuple[Blob, Path]]:
        now, items = self._wall(), []
        for path in (self._directory / kind.name / name).glob("*.json"):
            try:
                body = json.loads(path.read_bytes())
                text, wall_seconds = require_text(body["text"]), float(body["at"])
                if not math.isfinite(wall_seconds):
                    raise ValueError("must be a time")
                item = Blob(path.stem, text, max(0.0, now - wall_seconds))
            except (OSError, *MALFORMED_JSON_ERRORS) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._skipped.add(kind.name, [f"{name}/{path.name}"], reason or "")
                continue
            if kind.seconds is None or item.age_seconds < kind.seconds:
                items.append((item, path))
            else:
                path.unlink(missing_ok=True)
        return sorted(items, key=lambda pair: pair[0].age_seconds)
