"""The SQLite database of the file store: entries, and the audit of every change.

    state directory/overrides.db       the database, in WAL mode, synced before a commit returns
                    overrides.db-wal   commits that are not in the database file yet
                    overrides.db-shm   an index of that file, shared by the connections

All calls block.  One connection writes, and another one reads the audit, so that neither waits for
the other.  SQLite recovers the file after a crash: a partial commit was never acknowledged, and is
rolled back.

SQLite does not notice if its file is removed or replaced: commits would go to the unlinked file and
be lost when the process ends.  Every write therefore checks that the files are still the same.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.interface import (
    AUDIT_RECORDS_MAX,
    AuditRecord,
    Entry,
    StoreBrokenError,
    StoreUnavailableError,
)
from controller.util.files import sync_directory

# Pages of 4 KiB after which commits move from the WAL into the database file.
_CHECKPOINT_PAGES: Final = 64
# Old audit records are removed once per this number of commits.
_PRUNE_EVERY: Final = 256
_LARGEST: Final = 2**63 - 1
_FORMAT: Final = 1
# "SPEC": distinguishes this database from other SQLite files.
_APPLICATION_ID: Final = 0x53504543
_MODE: Final = 0o640

_SCHEMA = f"""
CREATE TABLE entries (
  override_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, body TEXT NOT NULL, until REAL,
  created_at REAL NOT NULL, ended TEXT NOT NULL, checksum TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE audit (
  sequence INTEGER PRIMARY KEY, at REAL NOT NULL, action TEXT NOT NULL, subject TEXT NOT NULL,
  author TEXT NOT NULL, reason TEXT NOT NULL, origin TEXT NOT NULL, before TEXT NOT NULL,
  after TEXT NOT NULL
) STRICT;
CREATE INDEX audit_of_subject ON audit (subject, sequence);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_FORMAT};
"""

_SELECT_ALL = (
    "SELECT sequence, at, action, subject, author, reason, origin, before, after FROM audit "
    "WHERE sequence < ? ORDER BY sequence DESC LIMIT ?"
)
_SELECT_SUBJECT = (
    "SELECT sequence, at, action, subject, author, reason, origin, before, after FROM audit "
    "WHERE sequence < ? AND subject = ? ORDER BY sequence DESC LIMIT ?"
)
_REASONS = {
    sqlite3.SQLITE_FULL: "No space left on device; nothing was changed",
    sqlite3.SQLITE_READONLY: "it is read-only; nothing was changed",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check its owner and mode",
    sqlite3.SQLITE_PERM: "access is denied; check its owner and mode",
    sqlite3.SQLITE_AUTH: "access is denied; check its owner and mode",
    sqlite3.SQLITE_BUSY: "another process has locked it; nothing was changed",
    sqlite3.SQLITE_LOCKED: "another process has locked it; nothing was changed",
    sqlite3.SQLITE_NOMEM: "there is not enough memory; nothing was changed",
    sqlite3.SQLITE_IOERR: (
        "the disk reports an I/O error; it is unknown whether the change was written: retry with "
        "the same id"
    ),
}


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in the database.  expires_at: Unix seconds of its end; None if it has none."""

    override_id: str
    revision: int
    body: str
    expires_at: float | None
    created_at: float
    ended: str

    @property
    def checksum(self) -> str:
        """Returns sixteen hexadecimal digits over all fields, which detect damage on the disk."""
        text = json.dumps(astuple(self))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def has_expired(self, now: float) -> bool:
        """Returns whether it has expired."""
        return self.expires_at is not None and self.expires_at <= now

    def to_entry(self, now: float) -> Entry:
        """Returns this entry as the store interface defines it."""
        remaining_seconds = None if self.expires_at is None else max(0.0, self.expires_at - now)
        return Entry(
            self.override_id, self.revision, self.body, remaining_seconds, self.created_at,
            self.ended
        )  # fmt: skip


class Database:
    """An open database.  All methods may raise StoreUnavailableError and StoreBrokenError.

    Call `change`, `add_record`, `replace` and `close` on one thread, and `audit` on another one,
    unless `is_single_connection` is set.  is_single_connection: there was no disk space for the
    shared-memory file, so that reads use the writing connection.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: sqlite3.Connection | None = None
        self.is_single_connection = False
        refuse_links(path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal")))
        with self._translate_errors():
            _create_database(path)
            try:
                self._writer = self._open_writer()
            except sqlite3.OperationalError as error:
                if _code(error) not in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
                    raise
                self.is_single_connection = True
                self._writer = self._open_writer()
        self._inodes = {file: inode for file in self._files if (inode := _inode_key(file))}

    @property
    def _files(self) -> list[Path]:
        return [Path(f"{self._path}{suffix}") for suffix in ("", "-wal", "-shm")]

    def _require_files(self) -> None:
        moved = [str(file) for file, inode in self._inodes.items() if _inode_key(file) != inode]
        if moved:
            raise StoreUnavailableError(
                f"{', '.join(moved)}: removed or replaced while in use; nothing was changed. "
                "Restore it, or restart the sidecar: it then uses the overrides of the new file"
            )

    def _open_writer(self) -> sqlite3.Connection:
        connection = _connect(self._path, "rw")
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self.is_single_connection:
            # Without shared memory: SQLite keeps the index of the WAL on its heap.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        for name, value in (
            ("synchronous", "FULL"),
            ("wal_autocheckpoint", _CHECKPOINT_PAGES),
            ("journal_size_limit", 4096 * _CHECKPOINT_PAGES),
            ("cell_size_check", "ON"),
        ):
            connection.execute(f"PRAGMA {name} = {value}")
        _require_format(connection, self._path)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StoreUnavailableError(
                f"{self._path}: this file system does not support SQLite's write-ahead log; "
                "use a local one for the state directory"
            )
        _require_entries(connection)

    def close(self) -> None:
        """Closes the connections.  All commits are already durable."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()

    @property
    def last_sequence(self) -> int:
        """Returns the highest sequence or revision that was used; 0 in an empty database."""
        with self._translate_errors():
            sequence, revision = self._writer.execute(
                "SELECT (SELECT max(sequence) FROM audit), (SELECT max(revision) FROM entries)"
            ).fetchone()
            return max(int(sequence or 0), int(revision or 0))

    def entries(self) -> list[StoredEntry]:
        """Returns all entries, tombstones and expired ones included."""
        with self._translate_errors():
            rows = self._writer.execute(
                "SELECT override_id, revision, body, until, created_at, ended, checksum "
                "FROM entries ORDER BY revision"
            ).fetchall()
            return [_entry_from_row(row) for row in rows]

    def change(self, entry: StoredEntry, record: AuditRecord) -> None:
        """Writes an entry, replacing one with its id, and an audit record; durable on return."""
        with self._translate_errors(), self._transaction() as connection:
            _insert_entry(connection, entry)
            _insert_record(connection, record)

    def add_record(self, record: AuditRecord) -> None:
        """Writes an audit record of an action that changes no entry; durable on return."""
        with self._translate_errors(), self._transaction() as connection:
            _insert_record(connection, record)

    def replace(self, entries: Sequence[StoredEntry]) -> None:
        """Writes entries, replacing those with their ids, without an audit record."""
        with self._translate_errors(), self._transaction() as connection:
            for entry in entries:
                _insert_entry(connection, entry)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs the block as one transaction, which is durable at the end of the block.

        Raises sqlite3.Error, and StoreUnavailableError if the files were removed or replaced.
        """
        self._require_files()
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
            raise

    def audit(self, limit: int, subject: str, before: int | None) -> list[AuditRecord]:
        """Returns the newest records first: of one subject unless "", older than `before`."""
        oldest = _LARGEST if before is None else min(before, _LARGEST)
        with self._translate_errors():
            cursor = (
                self._reader_connection().execute(_SELECT_SUBJECT, (oldest, subject, limit))
                if subject
                else self._reader_connection().execute(_SELECT_ALL, (oldest, limit))
            )
            return [_record_from_row(row) for row in cursor.fetchall()]

    def _reader_connection(self) -> sqlite3.Connection:
        if self.is_single_connection:
            return self._writer
        if self._reader is None:
            self._reader = _connect(self._path, "ro")
        return self._reader

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turns errors of SQLite and invalid rows into the errors of the store interface."""
        try:
            yield
        except sqlite3.Error as error:
            reason = _REASONS.get(_code(error))
            if reason is None:
                raise _damage_error(self._path, error) from error
            raise StoreUnavailableError(f"{self._path}: {reason}") from error
        except MALFORMED_JSON_ERRORS as error:
            raise _damage_error(self._path, error) from error


def refuse_links(*paths: Path) -> None:
    """Raises StoreBrokenError for an existing path that is not a regular file."""
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            raise StoreBrokenError(
                f"{path} is a symbolic link, which is not followed; its target was not changed: "
                "move the link away, or name another state directory"
            )
        if not stat.S_ISREG(mode):
            raise StoreBrokenError(f"{path} is not a regular file; move it away")


def _insert_entry(connection: sqlite3.Connection, entry: StoredEntry) -> None:
    """Writes an entry, replacing one with its id."""
    connection.execute(
        "INSERT OR REPLACE INTO entries "
        "(override_id, revision, body, until, created_at, ended, checksum) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*astuple(entry), entry.checksum),
    )


def _insert_record(connection: sqlite3.Connection, record: AuditRecord) -> None:
    sequence, *fields = astuple(record)
    connection.execute(
        "INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (int(sequence), *fields)
    )
    if int(record.sequence) % _PRUNE_EVERY == 0:
        _prune(connection, record.at)


def _prune(connection: sqlite3.Connection, now: float) -> None:
    """Removes all but the newest audit records, and the expired tombstones."""
    connection.execute(
        "DELETE FROM audit WHERE sequence <= (SELECT max(sequence) FROM audit) - ?",
        (AUDIT_RECORDS_MAX,),
    )
    connection.execute("DELETE FROM entries WHERE ended <> '' AND until <= ?", (now,))


def _inode_key(path: Path) -> tuple[int, int] | None:
    """Returns the device and inode numbers; None if the file does not exist."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _damage_error(path: Path, error: Exception) -> StoreBrokenError:
    return StoreBrokenError(
        f"{path} is damaged ({error}): restore it from a backup, or move it away together with "
        f"{path.name}-wal to start without overrides"
    )


def _entry_from_row(row: Iterable[Any]) -> StoredEntry:
    *fields, checksum = row
    entry = StoredEntry(*fields)
    if entry.checksum != checksum:
        raise ValueError(f"the checksum of override {entry.override_id!r} is wrong")
    return entry


def _record_from_row(row: Sequence[Any]) -> AuditRecord:
    sequence, wall_seconds, *texts = row
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"audit record {sequence} contains a value that is not text")
    return AuditRecord(str(int(sequence)), float(wall_seconds), *texts)


def _create_database(path: Path) -> None:
    """Creates an empty database atomically, if there is no file.

    An existing file of length 0 has therefore lost its content.  SQLite creates the files next to
    the database with the same mode.
    """
    if path.exists():
        return
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_SCHEMA)
        content = connection.serialize()
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(file)
    part.rename(path)
    sync_directory(path.parent)


def _require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreBrokenError for another program's database, a newer one, or an empty file."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not (application or version or tables):
        raise StoreBrokenError(
            f"{path} is empty and has lost its content: restore it from a backup, or move it away "
            "to start without overrides"
        )
    if application != _APPLICATION_ID:
        raise StoreBrokenError(f"{path} is not a database of overrides; move it away")
    if version > _FORMAT:
        raise StoreBrokenError(
            f"{path} has format {version}, which a newer version wrote; this one reads format "
            f"{_FORMAT}: install the newer version"
        )


def _require_entries(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError if the entries' B-tree is damaged or may have lost pages.

    It may have lost pages if some are orphaned.  If the audit is damaged, the orphaned pages may
    belong to the audit: reading it reports that, and overrides do not depend on it.
    """
    damage = _quick_check(connection, "(entries)")
    if (
        not damage
        and (damage_anywhere := _quick_check(connection, ""))
        and not _quick_check(connection, "(audit)")
    ):
        damage = damage_anywhere
    if damage:
        raise sqlite3.DatabaseError(" ".join(damage.split()))


def _quick_check(connection: sqlite3.Connection, scope: str) -> str:
    result = str(connection.execute(f"PRAGMA quick_check{scope}").fetchone()[0])
    return "" if result == "ok" else result
