"""The file of the database of overrides: how it is made, and what it has to be to be used."""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from controller.store.interface import StoreBrokenError

FORMAT: Final = 1
# "SPEC": tells this database from any other SQLite file.
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
PRAGMA user_version = {FORMAT};
"""


def create_database(path: Path) -> None:
    """Writes a database without overrides, whole or not at all, if there is no file.

    A file without content is therefore one that has lost it.  SQLite gives the file's mode to those
    beside it.
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


def require_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreBrokenError for a database of something else, a newer one, or an empty file."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not (application or version or tables):
        raise StoreBrokenError(
            f"{path} is empty, which no database of overrides is: restore it from a backup, or "
            "move it away to start without overrides"
        )
    if application != _APPLICATION_ID:
        raise StoreBrokenError(f"{path} is not a database of overrides; move it away")
    if version > FORMAT:
        raise StoreBrokenError(
            f"{path} has format {version}, which a newer version wrote; this one reads format "
            f"{FORMAT}: install the newer version"
        )


def require_entries(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError if the tree of the entries is damaged, or may lack a part.

    It may lack one where pages belong to nothing.  If the audit is damaged, they may be its own:
    that is found when it is read, and overrides do not depend on it.
    """
    found = _fault(connection, "(entries)")
    if not found and (anywhere := _fault(connection, "")) and not _fault(connection, "(audit)"):
        found = anywhere
    if found:
        raise sqlite3.DatabaseError(" ".join(found.split()))


def _fault(connection: sqlite3.Connection, scope: str) -> str:
    found = str(connection.execute(f"PRAGMA quick_check{scope}").fetchone()[0])
    return "" if found == "ok" else found


def sync_directory(path: Path) -> None:
    """Makes new names in a directory durable.  Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
