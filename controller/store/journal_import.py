"""Moves the journal of an earlier version into the database.

A line of `overrides.journal` is 16 hexadecimal digits of the SHA-256 of what follows, a space, and
a JSON object.  A last line that is torn was never acknowledged; anything wrong before it is damage.

The import is one transaction, and the journal is renamed only afterwards: a crash leaves either
the journal alone or a database that holds it already.  The database remembers the last line that it
took, so that nothing is taken twice.  After a rollback the previous version continues the journal
(or begins another), and the next import takes what is new in it.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from controller.core.errors import MALFORMED
from controller.store.database import (
    Database,
    StoredEntry,
    add,
    prune,
    put,
    refuse_links,
    typed_errors,
)
from controller.store.database_file import sync_directory
from controller.store.interface import AuditRecord, StoreBrokenError

_CHECK = 16
_log = structlog.get_logger(__name__)


def import_journal(journal: Path, database: Database, now: float) -> None:
    """Takes a journal that is there into the database, and renames it to `NAME.migrated`.

    now: Unix seconds.  Raises StoreBrokenError for damage, StoreUnavailableError, OSError; the
    journal is as before then.
    """
    refuse_links(journal)
    if not journal.exists():
        return
    with typed_errors(journal), database.transaction() as connection:
        count = _take(journal, connection, database.last_sequence)
        prune(connection, now)
    kept = journal.with_name(f"{journal.name}.migrated")
    refuse_links(kept)
    journal.replace(kept)
    sync_directory(journal.parent)
    _log.info("journal_migrated", journal=str(journal), kept_as=str(kept), records=count)


def _take(journal: Path, connection: sqlite3.Connection, last: int) -> int:
    """Takes the records of a journal and returns how many were new."""
    row = connection.execute("SELECT line_checksum FROM imported").fetchone()
    known = row[0] if row else ""
    lines = list(_checksums(journal)) if known else []
    skipped = lines.index(known) + 1 if known in lines else 0
    number, check, entries = 0, known, dict[str, StoredEntry]()
    for number, (check, text) in enumerate(_lines(journal), 1):  # noqa: B007  # read below
        if number <= skipped:
            continue
        try:
            record = json.loads(text)
            found = _audit(record)
            # Sequences and revisions stay, unless the database has given its own since.
            sequence = last + number - skipped if last else int(found.sequence)
            entry = _entry(record, sequence if last else int(record["revision"]))
        except MALFORMED as error:
            raise StoreBrokenError(
                f"{journal}, line {number}: not a record of an override ({error!r}); restore the "
                "file or move it away"
            ) from error
        add(connection, AuditRecord(str(sequence), *_rest(found)))
        entries[entry.override_id] = entry
    for entry in entries.values():
        put(connection, entry)
    connection.execute("DELETE FROM imported")
    connection.execute("INSERT INTO imported VALUES (?)", (check,))
    return number - skipped


def _checksums(journal: Path) -> Iterator[str]:
    for check, _ in _lines(journal):
        yield check


def _lines(journal: Path) -> Iterator[tuple[str, bytes]]:
    """(checksum, JSON) of every line.  Raises StoreBrokenError, OSError."""
    with os.fdopen(os.open(journal, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        torn = 0
        for number, line in enumerate(file, 1):
            if torn:
                raise StoreBrokenError(
                    f"{journal}, line {torn}: damaged (its checksum is wrong), and more follows "
                    "it; restore the file or move it away"
                )
            check, _, text = line.rstrip(b"\n").partition(b" ")
            if line.endswith(b"\n") and check == line_checksum(text):
                yield check.decode(), text
            else:
                torn = number


def line_checksum(text: bytes) -> bytes:
    """Computes what precedes the JSON of a line."""
    return hashlib.sha256(text).hexdigest()[:_CHECK].encode()


def _audit(record: dict[str, Any]) -> AuditRecord:
    """Raises one of MALFORMED for what is not a record."""
    names = ("action", "override_id", "author", "reason", "origin", "before", "body")
    return AuditRecord(
        str(int(record["sequence"])), float(record["at"]), *(_text(record[name]) for name in names)
    )


def _rest(record: AuditRecord) -> tuple[float, str, str, str, str, str, str, str]:
    return (
        record.at, record.action, record.subject, record.author, record.reason, record.origin,
        record.before, record.after,
    )  # fmt: skip


def _entry(record: dict[str, Any], revision: int) -> StoredEntry:
    until = record["until"]
    return StoredEntry(
        _text(record["override_id"]),
        revision,
        _text(record["body"]),
        None if until is None else float(until),
        float(record["at"]),
        _text(record["ended"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is needed, not {type(value).__name__}")
    value.encode()  # half a surrogate pair can stand in JSON, and nowhere else
    return value
