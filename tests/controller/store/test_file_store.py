"""The journal survives what files go through."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller.store import file_store
from controller.store import journal as journal_module
from controller.store.file_store import FileStore
from controller.store.journal import Journal
from controller.store.port import (
    ConflictError,
    StoreBrokenError,
    StoreTakenError,
    StoreUnavailableError,
    Who,
)
from tests.controller.service.harness import ENVIRONMENT

ANN = Who("ann", "because", "uid 1000")

WRITER = """
import asyncio, sys
from pathlib import Path
from controller.store.file_store import FileStore
from controller.store.port import Who

async def main():
    store = FileStore(Path(sys.argv[1]))
    await store.open(lambda: None)
    number = 0
    while True:
        entry = await store.write(f"o{number}", "x" * 200, None, 0, Who("a", "r", "o"))
        print(number, entry.revision, flush=True)
        number += 1

asyncio.run(main())
"""


async def opened(folder: Path, **options: object) -> FileStore:
    store = FileStore(folder, **options)  # type: ignore[arg-type]
    await store.open(lambda: None)
    return store


async def filled(folder: Path, count: int = 3) -> Path:
    store = await opened(folder)
    for number in range(count):
        await store.write(f"o{number}", "{}", None, 0, ANN)
    await store.close()
    return folder / "overrides.journal"


async def names(folder: Path) -> set[str]:
    store = await opened(folder)
    try:
        return {entry.override_id for entry in await store.entries()}
    finally:
        await store.close()


@pytest.mark.parametrize("life", range(3))
def test_killed_in_the_middle_of_writing_it_has_everything_it_acknowledged(
    tmp_path: Path, life: int
):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(20 + 17 * life)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()
    told = {f"o{line.split()[0]}" for line in acknowledged if line.endswith("\n")}
    assert len(told) >= 20
    assert told <= asyncio.run(names(tmp_path))


@pytest.mark.parametrize("cut", [1, 10, 60, 150])
async def test_a_torn_last_line_was_never_acknowledged_and_is_cut_off(tmp_path: Path, cut: int):
    journal = await filled(tmp_path)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert await names(tmp_path) == {"o0", "o1"}
    store = await opened(tmp_path)
    await store.write("o2", "{}", None, 0, ANN)
    await store.close()
    assert await names(tmp_path) == {"o0", "o1", "o2"}


async def test_rubbish_at_the_end_is_cut_off(tmp_path: Path):
    journal = await filled(tmp_path)
    with journal.open("ab") as file:
        file.write(b"\0" * 512)
    assert await names(tmp_path) == {"o0", "o1", "o2"}


async def test_damage_in_the_middle_is_refused_with_file_and_line(tmp_path: Path):
    journal = await filled(tmp_path)
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    with pytest.raises(StoreBrokenError, match=r"overrides.journal, line 2: damaged"):
        await opened(tmp_path)
    assert journal.read_bytes() == content
    # And nothing is held: with the file mended it opens.
    journal.unlink()
    assert await names(tmp_path) == set()


async def test_a_record_that_is_none_is_refused(tmp_path: Path):
    journal = Journal(tmp_path / "overrides.journal")
    journal.append({"something": "else"})
    journal.close()
    with pytest.raises(StoreBrokenError, match="a record that is none"):
        await opened(tmp_path)


async def long_journal(folder: Path) -> Path:
    """An override in force, then 15 that were set and cleared."""
    store = await opened(folder)
    await store.write("kept", "1", None, 0, ANN)
    for number in range(15):
        entry = await store.write(f"o{number}", "2", None, 0, ANN)
        await store.clear(f"o{number}", entry.revision, ANN)
    await store.close()
    return folder / "overrides.journal"


async def test_a_long_journal_is_cut_to_what_is_held_and_the_newest_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = await long_journal(tmp_path)
    store = await opened(tmp_path)
    entries, audit = await store.entries(), await store.audit(10)
    await store.close()
    monkeypatch.setattr(file_store, "AUDIT_KEPT", 10)
    mode = journal.stat().st_mode
    store = await opened(tmp_path)
    # 31 records: of the first 21, that in force and the traces of those cleared.
    assert len(journal.read_bytes().splitlines()) == 10 + 1 + 10
    assert journal.stat().st_mode == mode
    same = [(e.override_id, e.revision, e.body, e.ended) for e in entries]
    found = await store.entries()
    assert [(e.override_id, e.revision, e.body, e.ended) for e in found] == same
    assert await store.audit(10) == audit
    with pytest.raises(ConflictError):
        await store.write("o0", "3", None, 0, ANN)
    await store.write("new", "4", None, 0, ANN)
    await store.close()
    later = FileStore(tmp_path, lambda: time.time() + 8 * 86_400)
    await later.open(lambda: None)
    await later.close()
    assert len(journal.read_bytes().splitlines()) == 10 + 1
    assert await names(tmp_path) >= {"kept", "new"}


async def test_a_journal_that_cannot_be_cut_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = await long_journal(tmp_path)
    before = journal.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_store, "AUDIT_KEPT", 10)
    monkeypatch.setattr(journal_module, "write_whole", full)
    store = await opened(tmp_path)
    assert journal.read_bytes() == before
    await store.write("new", "4", None, 0, ANN)
    await store.close()
    assert {"kept", "new"} <= await names(tmp_path)


async def test_a_second_sidecar_is_refused_and_the_first_goes_on(tmp_path: Path):
    store = await opened(tmp_path)
    with pytest.raises(StoreTakenError, match="give each its own directory"):
        await opened(tmp_path)
    await store.write("a", "1", None, 0, ANN)
    await store.close()
    assert await names(tmp_path) == {"a"}


async def test_a_full_disk_refuses_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = await filled(tmp_path, 1)
    store = await opened(tmp_path)
    before = journal.read_bytes()
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) > 20:
            written: int = real(descriptor, bytes(data)[:20])
            return written
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", lambda d, data: half(d, data[:40]))
    with pytest.raises(StoreUnavailableError, match="No space left on device; nothing was changed"):
        await store.write("b", "2", None, 0, ANN)
    monkeypatch.undo()
    assert journal.read_bytes() == before
    await store.write("c", "3", None, 0, ANN)
    await store.close()
    assert await names(tmp_path) == {"o0", "c"}


async def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="file"):
        await opened(tmp_path / "file" / "state")


@pytest.mark.parametrize("jump", [-300.0, 300.0])
async def test_a_clock_that_is_set_moves_no_end(tmp_path: Path, jump: float):
    shift = 0.0
    store = await opened(tmp_path, wall=lambda: time.time() + shift)
    await store.write("long", "1", 60.0, 0, ANN)
    shift = jump
    await store.write("later", "2", 60.0, 0, ANN)
    found = {e.override_id: e for e in await store.entries()}
    await store.close()
    for name in ("long", "later"):
        assert found[name].ended == ""
        assert found[name].remaining_seconds == pytest.approx(60, abs=30)


async def test_the_journal_can_be_read_by_people(tmp_path: Path):
    journal = await filled(tmp_path, 1)
    check, _, text = journal.read_text().strip().partition(" ")
    assert len(check) == 16
    assert json.loads(text)["author"] == "ann"
