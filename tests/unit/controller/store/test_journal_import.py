"""Journals of earlier versions move into the database: whole, once, and with a way back."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller.store import database as database_module
from controller.store import journal_import
from controller.store.file_store import FileStore
from controller.store.interface import (
    Actor,
    AuditRecord,
    ConflictError,
    Entry,
    StoreBrokenError,
    StoreUnavailableError,
)
from tests.support.journal_files import lines, record, write_journal
from tests.support.service_harness import ENVIRONMENT

ANN = Actor("ann", "because", "uid 1000")
OPENER = """
import asyncio, sys
from pathlib import Path
from controller.store.file_store import FileStore
print("go", flush=True)
asyncio.run(FileStore(Path(sys.argv[1])).open(lambda: None))
"""
SMALL = [record(1, "a", "1"), record(2, "b", "1"), record(3, "b", ""), record(4, "c", "2")]


async def content(folder: Path) -> tuple[dict[str, Entry], list[AuditRecord]]:
    store = FileStore(folder)
    await store.open(lambda: None)
    try:
        return {e.override_id: e for e in await store.entries()}, list(await store.audit(10**6))
    finally:
        await store.close()


async def test_a_journal_is_taken_with_its_etags_and_audit_and_kept_under_another_name(
    tmp_path: Path,
):
    journal = write_journal(tmp_path, SMALL)
    before = journal.read_bytes()
    entries, audit = await content(tmp_path)
    assert {(e.override_id, e.revision, e.body, e.ended) for e in entries.values()} == {
        ("a", 1, "1", ""),
        ("b", 3, "", "cleared"),
        ("c", 4, "2", ""),
    }
    assert [(r.sequence, r.action, r.subject, r.before, r.after) for r in audit] == [
        ("4", "set", "c", "", "2"),
        ("3", "clear", "b", "1", ""),
        ("2", "set", "b", "", "1"),
        ("1", "set", "a", "", "1"),
    ]
    assert not journal.exists()
    assert (tmp_path / "overrides.journal.migrated").read_bytes() == before
    # The next start finds the same, and what is new follows on it.
    again, same_audit = await content(tmp_path)
    assert {n: e.etag for n, e in again.items()} == {n: e.etag for n, e in entries.items()}
    assert same_audit == audit
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    assert (await store.write("d", "3", None, 0, ANN)).revision == 5
    with pytest.raises(ConflictError):
        await store.write("b", "3", None, 0, ANN)
    await store.close()


async def test_a_torn_last_line_is_left_out_and_damage_before_it_is_refused(tmp_path: Path):
    journal = write_journal(tmp_path / "torn", SMALL)
    journal.write_bytes(journal.read_bytes()[:-7])
    entries, _ = await content(tmp_path / "torn")
    assert entries.keys() == {"a", "b"}
    journal = write_journal(tmp_path / "damaged", SMALL)
    damaged = bytearray(journal.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(StoreBrokenError, match=r"overrides.journal, line \d: damaged"):
        await content(tmp_path / "damaged")
    assert journal.read_bytes() == damaged
    write_journal(tmp_path / "damaged", SMALL)
    assert (await content(tmp_path / "damaged"))[0].keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    "wrong",
    [{"something": "else"}, record(5, "d", "1", until="x"), record(5, "d", "\ud800"), [], None,
     record(2, "d", "1"), record(2**70, "d", "1"), record(5, "d", "1", at=float("nan"))],
)  # fmt: skip
async def test_a_line_that_is_not_a_record_is_refused_and_nothing_is_taken(
    tmp_path: Path, wrong: object
):
    journal = write_journal(tmp_path, [*SMALL, wrong])  # type: ignore[list-item]
    before = journal.read_bytes()
    with pytest.raises(StoreBrokenError, match=r"overrides\.journal"):
        await content(tmp_path)
    assert journal.read_bytes() == before
    write_journal(tmp_path, SMALL)
    assert (await content(tmp_path))[0].keys() == {"a", "b", "c"}


async def test_a_crash_between_the_import_and_the_renaming_takes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = write_journal(tmp_path, SMALL)

    def fails(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        await content(tmp_path)
    monkeypatch.undo()
    assert journal.exists()
    entries, audit = await content(tmp_path)
    assert [r.sequence for r in audit] == ["4", "3", "2", "1"]
    assert {e.revision for e in entries.values()} == {1, 3, 4}
    assert not journal.exists()


def test_killed_at_any_instant_of_the_import_a_start_repeats_it(tmp_path: Path):
    count = 2000
    write_journal(tmp_path, [record(n, f"o{n % 500}", str(n)) for n in range(1, count + 1)])
    rng = random.Random(7)
    cut_short = 0
    while (tmp_path / "overrides.journal").exists():
        command = [sys.executable, "-c", OPENER, str(tmp_path)]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            # The later ones live longer, so that one comes to the end.
            time.sleep(rng.uniform(0, 0.1 + 0.1 * cut_short))
            process.send_signal(signal.SIGKILL)
        cut_short += process.returncode == -signal.SIGKILL
    assert cut_short > 1
    entries, audit = asyncio.run(content(tmp_path))
    assert [int(r.sequence) for r in audit] == list(range(count, 0, -1))
    assert {e.override_id: e.body for e in entries.values()} == {
        f"o{n % 500}": str(n) for n in range(count - 499, count + 1)
    }


async def test_after_a_rollback_the_next_import_takes_what_is_new(tmp_path: Path):
    write_journal(tmp_path, SMALL)
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    await store.write("here", "5", None, 0, ANN)
    await store.close()
    # The previous version goes on with the journal under its old name.
    (tmp_path / "overrides.journal.migrated").rename(tmp_path / "overrides.journal")
    with (tmp_path / "overrides.journal").open("ab") as file:
        file.write(lines([record(5, "there", "6"), record(6, "a", "")]))
    entries, audit = await content(tmp_path)
    assert {e.override_id for e in entries.values() if not e.ended} == {"c", "here", "there"}
    assert [(r.sequence, r.action, r.subject) for r in audit[:3]] == [
        ("7", "clear", "a"),
        ("6", "set", "there"),
        ("5", "set", "here"),
    ]
    assert len(audit) == 7
    assert len({e.revision for e in entries.values()}) == len(entries)


async def test_a_journal_that_a_previous_version_began_anew_is_added_to_the_database(
    tmp_path: Path,
):
    write_journal(tmp_path, SMALL)
    await content(tmp_path)
    write_journal(tmp_path, [])
    assert (await content(tmp_path))[0].keys() == {"a", "b", "c"}
    write_journal(tmp_path, [record(1, "new", "7")])
    entries, audit = await content(tmp_path)
    assert entries.keys() == {"a", "b", "c", "new"}
    assert [r.sequence for r in audit] == ["5", "4", "3", "2", "1"]


async def test_an_override_of_a_journal_that_a_clock_ahead_wrote_keeps_what_it_was_granted(
    tmp_path: Path,
):
    ahead = time.time() + 30 * 86_400
    write_journal(tmp_path, [record(1, "hour", "1", at=ahead, until=ahead + 3600)])
    entries, _ = await content(tmp_path)
    assert entries["hour"].remaining_seconds == pytest.approx(3600, abs=60)


async def test_a_long_journal_is_cut_to_the_newest_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database_module, "AUDIT_KEPT", 10)
    write_journal(tmp_path, [record(n, f"o{n}", "1") for n in range(1, 31)])
    entries, audit = await content(tmp_path)
    assert len(entries) == 30
    assert [int(r.sequence) for r in audit] == list(range(30, 20, -1))


def test_the_checksum_of_a_line_is_that_of_earlier_versions():
    assert journal_import.line_checksum(b'{"a":1}') == b"015abd7f5cc57a2d"
