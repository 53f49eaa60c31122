"""The file store survives kills, damage, full disks, links, and clocks that are set."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.store import database as database_module
from controller.store.database import Database
from controller.store.file_store import FileStore
from controller.store.interface import (
    LIVE_ENTRIES_MAX,
    PROFILES,
    Actor,
    ConflictError,
    StoreBrokenError,
    StoreTakenError,
    StoreUnavailableError,
)
from tests.support.service_harness import ENVIRONMENT

ANN = Actor("ann", "because", "uid 1000")

WRITER = """
import asyncio, sys
from pathlib import Path
from controller.store.file_store import FileStore
from controller.store.interface import Actor

async def main():
    store = FileStore(Path(sys.argv[1]))
    await store.open(lambda: None)
    number = 0
    while True:
        entry = await store.write(f"o{number}", "x" * 200, None, 0, Actor("a", "r", "o"))
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
    return folder / "overrides.db"


async def names(folder: Path) -> set[str]:
    store = await opened(folder)
    try:
        return {entry.override_id for entry in await store.entries()}
    finally:
        await store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


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
    acknowledged_names = {f"o{line.split()[0]}" for line in acknowledged if line.endswith("\n")}
    assert len(acknowledged_names) >= 20
    assert acknowledged_names <= asyncio.run(names(tmp_path))


@pytest.mark.parametrize("cut", [1, 100, 4000])
async def test_a_torn_commit_was_never_acknowledged_and_disappears(tmp_path: Path, cut: int):
    store = await opened(tmp_path / "whole")
    for number in range(3):
        await store.write(f"o{number}", "{}", None, 0, ANN)
    # A copy of the files as a loss of power leaves them, the end of the last commit missing.
    torn = tmp_path / "torn"
    torn.mkdir()
    for name in ("overrides.db", "overrides.db-wal"):
        (torn / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    log = torn / "overrides.db-wal"
    log.write_bytes(log.read_bytes()[:-cut])
    await store.close()
    assert await names(torn) == {"o0", "o1"}
    store = await opened(torn)
    await store.write("o2", "{}", None, 0, ANN)
    await store.close()
    assert await names(torn) == {"o0", "o1", "o2"}


async def test_a_flipped_bit_in_an_entry_is_refused_and_the_file_is_left_alone(tmp_path: Path):
    store = await opened(tmp_path)
    await store.write("o", '{"gamma": 1}', None, 0, ANN)
    await store.close()
    database = tmp_path / "overrides.db"
    content = database.read_bytes()
    assert content.count(b'{"gamma": 1}') == 2  # the entry and its audit record
    database.write_bytes(content.replace(b'{"gamma": 1}', b'{"gamma": 3}'))
    with pytest.raises(StoreBrokenError, match=r"overrides.db is damaged .*checksum.*move it away"):
        await opened(tmp_path)
    assert b'{"gamma": 3}' in database.read_bytes()
    # The lock is free again: with the file moved away the store opens.
    database.unlink()
    assert await names(tmp_path) == set()


async def test_a_database_that_has_lost_its_content_is_not_taken_for_a_new_one(tmp_path: Path):
    database = await filled(tmp_path)
    database.write_bytes(b"")
    with pytest.raises(StoreBrokenError, match="is empty and has lost its content"):
        await opened(tmp_path)
    database.unlink()
    assert await names(tmp_path) == set()


@pytest.mark.parametrize("content", [b"no database" * 500, b"SQLite format 3\0" + b"\xff" * 8000])
async def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "overrides.db").write_bytes(content)
    with pytest.raises(StoreBrokenError, match=r"overrides\.db"):
        await opened(tmp_path)
    assert (tmp_path / "overrides.db").read_bytes() == content


async def test_a_database_of_another_program_or_a_newer_version_is_refused(tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    with contextlib.closing(sqlite3.connect(other / "overrides.db")) as connection:
        connection.execute("CREATE TABLE something (x)")
    with pytest.raises(StoreBrokenError, match="not a database of overrides"):
        await opened(other)
    database = await filled(tmp_path)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreBrokenError, match="format 2, which a newer version wrote"):
        await opened(tmp_path)


async def test_damage_to_the_audit_is_a_typed_error_and_overrides_go_on(tmp_path: Path):
    database = await filled(tmp_path, 200)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        page = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name='audit'"
        ).fetchone()
    content = bytearray(database.read_bytes())
    start = (page[0] - 1) * 4096
    content[start : start + 4096] = os.urandom(4096)
    database.write_bytes(content)
    store = await opened_in_spite(tmp_path)
    if store is None:
        return
    with pytest.raises(StoreBrokenError, match="damaged"):
        await store.audit(1000)
    assert len(await store.entries()) == 200
    await store.close()


async def test_no_override_disappears_with_a_page_in_the_place_of_another(tmp_path: Path):
    database = await filled(tmp_path / "whole", 200)
    content = database.read_bytes()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'entries'"
        ).fetchone()
    pages = len(content) // 4096
    refused = 0
    for other in range(1, pages):
        data, here, there = bytearray(content), (root - 1) * 4096, other * 4096
        data[here : here + 4096] = content[there : there + 4096]
        data[there : there + 4096] = content[here : here + 4096]
        (folder := tmp_path / str(other)).mkdir()
        (folder / "overrides.db").write_bytes(data)
        store = await opened_in_spite(folder)
        if store is None:
            refused += 1
            continue
        assert len(await store.entries()) == 200
        await store.close()
    # Each but the one that takes its own place.
    assert refused >= pages - 2 > 5


async def opened_in_spite(folder: Path) -> FileStore | None:
    """None where the damage is found at the start already."""
    try:
        return await opened(folder)
    except StoreBrokenError:
        return None


@pytest.mark.parametrize("name", ["overrides.db", "overrides.db-wal", "lock"])
@pytest.mark.parametrize("exists", [True, False])
async def test_a_symbolic_link_is_refused_and_its_target_is_not_touched(
    tmp_path: Path, name: str, exists: bool
):
    folder, target = tmp_path / "state", tmp_path / "precious"
    folder.mkdir()
    if exists:
        target.write_bytes(b"precious")
    (folder / name).symlink_to(target)
    with pytest.raises(StoreBrokenError, match=f"{name} is a symbolic link, which is not followed"):
        await opened(folder)
    assert target.exists() == exists
    if exists:
        assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("mask", [0, 0o077])
async def test_others_cannot_read_its_files(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        store = await opened(tmp_path / "state")
        await store.write("a", "1", None, 0, ANN)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()}
    await store.close()
    assert {"overrides.db", "overrides.db-wal", "overrides.db-shm", "lock"} <= modes.keys()
    assert set(modes.values()) == {0o640 & ~mask}


async def test_the_audit_keeps_the_newest_records_and_what_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database_module, "AUDIT_RECORDS_MAX", 10)
    monkeypatch.setattr(database_module, "_PRUNE_EVERY", 4)
    store = await opened(tmp_path)
    await store.write("kept", "1", None, 0, ANN)
    for number in range(15):
        entry = await store.write(f"o{number}", "2", None, 0, ANN)
        await store.clear(f"o{number}", entry.revision, ANN)
    records = await store.audit(100)
    assert 10 <= len(records) <= 10 + 4
    assert [int(r.sequence) for r in records] == list(range(31, 31 - len(records), -1))
    await store.close()
    store = await opened(tmp_path)
    ended_by_id = {e.override_id: e.ended for e in await store.entries()}
    assert ended_by_id == {"kept": "", **{f"o{n}": "cleared" for n in range(15)}}
    # Sequences continue from where they were, and an ended id is still taken.
    entry = await store.write("new", "3", None, 0, ANN)
    assert entry.revision == 32
    with pytest.raises(ConflictError):
        await store.write("o0", "3", None, 0, ANN)
    await store.close()


async def test_a_second_sidecar_is_refused_and_the_first_goes_on(tmp_path: Path):
    store = await opened(tmp_path)
    with pytest.raises(StoreTakenError, match="give each its own directory"):
        await opened(tmp_path)
    await store.write("a", "1", None, 0, ANN)
    await store.close()
    assert await names(tmp_path) == {"a"}


async def test_reading_the_audit_does_not_wait_for_a_write_nor_a_write_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = await opened(tmp_path)
    await store.write("a", "1", None, 0, ANN)
    reading, go_on, real = threading.Event(), threading.Event(), Database.audit

    def held_up(*arguments: object) -> object:
        reading.set()
        assert go_on.wait(10)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Database, "audit", held_up)
    try:
        # As many as the pool of threads that everything else uses has, and more.
        audits = [asyncio.create_task(store.audit(10)) for _ in range(50)]
        assert await asyncio.to_thread(reading.wait, 10)
        await asyncio.wait_for(store.write("b", "2", None, 0, ANN), 10)
        await asyncio.wait_for(store.blobs.names(PROFILES), 10)
    finally:
        go_on.set()
    assert [r.subject for r in await audits[0]] == ["b", "a"]
    await asyncio.gather(*audits)
    await store.close()


async def test_an_audit_that_is_read_beside_writes_is_never_called_damaged(tmp_path: Path):
    store = await opened(tmp_path)
    stop = False

    async def read() -> int:
        count = 0
        while not stop:
            records = await store.audit(1000)
            numbers = [int(r.sequence) for r in records]
            assert numbers == list(range(len(numbers), 0, -1))
            count += 1
        return count

    readers = [asyncio.create_task(read()) for _ in range(3)]
    for number in range(LIVE_ENTRIES_MAX):
        await store.write(f"o{number}", "x" * 300, None, 0, ANN)
    stop = True
    assert min(await asyncio.gather(*readers)) > 0
    await store.close()


async def test_a_full_disk_refuses_and_loses_nothing_that_was_acknowledged(small_disk: Path):
    state = small_disk / "state"
    (small_disk / "other").write_bytes(b"\0" * 80_000)
    store = await opened(state)
    taken: set[str] = set()
    refusal = ""
    while not refusal:
        name = f"o{len(taken)}"
        try:
            await store.write(name, "x" * 1000, None, 0, ANN)
            taken.add(name)
        except StoreUnavailableError as error:
            refusal = str(error)
    assert "No space left on device" in refusal
    assert "nothing was changed" in refusal
    assert not store.health.ok
    assert taken
    fill(small_disk / "filler")
    assert {e.override_id for e in await store.entries()} == taken
    assert len(await store.audit(1000)) == len(taken)
    await store.close()
    fill(small_disk / "filler-2")
    # A start on a full disk: what was acknowledged is in force, and can be asked for.
    store = await opened(state)
    assert {e.override_id for e in await store.entries()} == taken
    assert len(await store.audit(1000)) == len(taken)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        await store.write("more", "x" * 9000, None, 0, ANN)
    (small_disk / "other").unlink()
    await store.clear("o0", 1, ANN)
    await store.write("more", "1", None, 0, ANN)
    assert store.health.ok
    await store.close()
    assert await names(state) == taken | {"more"}


async def test_after_a_clean_end_it_starts_on_a_full_disk_and_goes_on_once_there_is_space(
    small_disk: Path,
):
    await filled(small_disk / "state")
    fill(small_disk / "filler")
    # There is no room for the file that connections share.
    store = await opened(small_disk / "state")
    assert {e.override_id for e in await store.entries()} == {"o0", "o1", "o2"}
    assert len(await store.audit(10)) == 3
    with pytest.raises(StoreUnavailableError, match="No space left"):
        await store.write("more", "x" * 9000, None, 0, ANN)
    (small_disk / "filler").unlink()
    await store.write("more", "1", None, 0, ANN)
    assert len(await store.audit(10)) == 4
    assert store.health.ok
    await store.close()
    assert await names(small_disk / "state") == {"o0", "o1", "o2", "more"}


async def test_a_read_only_file_system_refuses_a_start_and_leaves_the_files_alone(small_disk: Path):
    await filled(small_disk / "state")
    remount(small_disk, "ro")
    with pytest.raises(StoreUnavailableError, match="Read-only file system"):
        await opened(small_disk / "state")
    remount(small_disk, "rw")
    assert await names(small_disk / "state") == {"o0", "o1", "o2"}


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
    entry_by_id = {e.override_id: e for e in await store.entries()}
    await store.close()
    for name in ("long", "later"):
        assert entry_by_id[name].ended == ""
        assert entry_by_id[name].remaining_seconds == pytest.approx(60, abs=30)


DAY = 86_400.0


async def left(folder: Path, shift: float) -> dict[str, float | None]:
    """Seconds that each override has after a start with the clock so far off."""
    store = await opened(folder, wall=lambda: time.time() + shift)
    try:
        return {e.override_id: e.remaining_seconds for e in await store.entries() if not e.ended}
    finally:
        await store.close()


async def test_a_start_with_the_clock_behind_makes_no_override_longer_than_was_granted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store = await opened(tmp_path)
    await store.write("hour", "1", 3600.0, 0, ANN)
    await store.write("ever", "2", None, 0, ANN)
    entry = await store.write("over", "3", 3600.0, 0, ANN)
    await store.clear("over", entry.revision, ANN)
    await store.close()
    back = await left(tmp_path, -30 * DAY)
    assert back == {"hour": pytest.approx(3600, abs=60), "ever": None}
    assert "clock_went_back" in capsys.readouterr().out
    # From then on it runs by the clock that there is, over further starts too.
    assert await left(tmp_path, -30 * DAY + 1800) == {
        "hour": pytest.approx(1800, abs=60),
        "ever": None,
    }
    assert await left(tmp_path, -30 * DAY + 3700) == {"ever": None}
    # With the clock right again it stays ended.
    assert await left(tmp_path, 0.0) == {"ever": None}


@pytest.mark.parametrize("name", ["overrides.db", "overrides.db-wal", "overrides.db-shm"])
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_was_removed_or_replaced_takes_no_more_changes(
    tmp_path: Path, name: str, replaced: bool
):
    store = await opened(tmp_path)
    try:
        await store.write("before", "{}", None, 0, ANN)
        (tmp_path / name).rename(tmp_path / "aside")
        if replaced:
            (tmp_path / name).write_bytes((tmp_path / "aside").read_bytes())
        with pytest.raises(StoreUnavailableError, match=f"{name}: removed or replaced while"):
            await store.write("after", "{}", None, 0, ANN)
        broken = store.health
        (tmp_path / "aside").rename(tmp_path / name)
        await store.write("after", "{}", None, 0, ANN)
        assert (broken.ok, store.health.ok) == (False, True)
    finally:
        await store.close()
    assert await names(tmp_path) == {"before", "after"}


async def test_a_directory_that_was_replaced_takes_no_more_changes(tmp_path: Path):
    store = await opened(tmp_path / "state")
    try:
        (tmp_path / "state").rename(tmp_path / "aside")
        (tmp_path / "state").mkdir()
        with pytest.raises(StoreUnavailableError, match="removed or replaced while in use"):
            await store.write("after", "{}", None, 0, ANN)
    finally:
        await store.close()
