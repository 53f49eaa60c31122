"""Faults of what the sidecar keeps: a full disk, damage, a clock that is set, half a profile."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from controller.store.file_store import FileStore
from controller.store.interface import (
    Actor,
    AuditRecord,
    ConflictError,
    Entry,
    StoreError,
    StoreUnavailableError,
)
from controller.util.exit_codes import Exit
from tests.support.eventually import eventually
from tests.support.service_harness import make_profile
from tests.support.sidecar_process import controller
from tools.faults.driving import PIN, Scene, engines_at, scene
from tools.faults.fault import ON, CannotInjectError, Fault, Seen, fault
from tools.faults.link_faults import new_session, steered_again, went_on

_DAY_SECONDS = 86_400
_FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
_TTL_SECONDS = 3.0
_ANN = Actor("ann", "a fault is injected", "uid 1000")
# Changes that a full disk refuses, before the next start.
_REFUSALS = 5
_CLEAR_SHARE = 0.2


@fault(
    "state-disk-full",
    f"{ON}; overrides refused; what was acknowledged is there after a restart",
    quick=True,
)
def disk_full(place: Path, seen: Seen) -> None:
    """State and record directories on a tmpfs of 256 KiB that is filled."""
    with _small_disk(place) as disk:
        (disk / "state").mkdir()
        flags = ("--state-directory", f"{disk}/state")
        environment = {"CONTROLLER_RECORD_DIRECTORY": f"{disk}/records"}
        with scene(place, *flags, environment=environment) as here:
            moment, before = time.monotonic(), here.drive.now
            _fill(disk / "filler")
            acknowledged, refused = _until_refused(here)
            seen.that(
                "an override is refused: “No space left”",
                "UNAVAILABLE" in refused and "No space left" in refused,
                refused,
            )
            # The ended session is written to the same disk.
            new_session(here)
            went_on(here, seen, moment)
            (disk / "filler").unlink()
            here.operator.pin("later")
            seen.that("with space again overrides are taken", True)
            acknowledged |= {PIN, "later"}
            steered_again(here, seen, here.sidecars.restart(), before.session)
            in_force = here.operator.in_force()
            seen.that("what was acknowledged, and no more", in_force == acknowledged, in_force)
            _fill(disk / "filler")
            here.sidecars.restart()
            in_force = here.operator.in_force()
            seen.that("it starts on a full disk, too", in_force == acknowledged, in_force)


def disk_full_at_random(count: int) -> Fault:
    """Makes the fault of `count` disks that fill up at a random instant of a store's life."""

    def inject(place: Path, seen: Seen) -> None:
        rng = random.Random()
        lost: list[str] = []
        acknowledged = refused = 0
        with _small_disk(place) as disk:
            for _ in range(count):
                known, refusals, wrong = asyncio.run(_filled_life(disk, rng))
                acknowledged, refused, lost = acknowledged + known, refused + refusals, lost + wrong
        seen.that(f"{count} full disks: what was acknowledged, and no more", not lost, lost[:5])
        seen.figure("changes_acknowledged", acknowledged)
        seen.figure("changes_refused", refused)
        seen.figure("lost_or_wrong", len(lost))

    return Fault(
        "state-disk-full-at-random",
        f"a disk of 256 KiB that is full at some instant of a store's life, {count} times",
        "what was acknowledged is there, and no more, also after a start on the full disk",
        inject,
        quick=True,
    )


@asynccontextmanager
async def _store(folder: Path) -> AsyncIterator[FileStore]:
    """An open store.  Raises StoreError if it refuses to start."""
    store = FileStore(folder)
    await store.open(lambda: None)
    try:
        yield store
    finally:
        await store.close()


async def _filled_life(disk: Path, rng: random.Random) -> tuple[int, int, list[str]]:
    """Counts of acknowledged and of refused changes, and every difference from the former."""
    state, filler = disk / "state", disk / "filler"
    filler.write_bytes(b"\0" * rng.randrange(150_000))
    known: dict[str, tuple[int, str]] = {}
    acknowledged = refused = 0
    async with _store(state) as store:
        while refused < _REFUSALS:
            name = f"o{rng.randrange(40)}"
            try:
                revision = known[name][0] if name in known else None
                if revision is not None and rng.random() < _CLEAR_SHARE:
                    await store.clear(name, revision, _ANN)
                    del known[name]
                else:
                    body = "x" * rng.randrange(1, 3000)
                    known[name] = (
                        (await store.write(name, body, None, revision or 0, _ANN)).revision,
                        body,
                    )
                acknowledged += 1
            except ConflictError:
                continue  # it was cleared, and its id is not taken again
            except StoreUnavailableError:
                refused += 1
        wrong = _differs("while it is full", await store.entries(), known)
    for when in ("after a start on the full disk", "after a start with room"):
        async with _store(state) as store:
            wrong += _differs(when, await store.entries(), known)
        filler.unlink(missing_ok=True)
    shutil.rmtree(state)
    return acknowledged, refused, wrong


def _differs(when: str, entries: Sequence[Entry], known: dict[str, tuple[int, str]]) -> list[str]:
    """Names the overrides that are not as they were acknowledged."""
    found = {it.override_id: (it.revision, it.body) for it in entries if not it.ended}
    return [
        f"{name} {when}"
        for name in known.keys() | found.keys()
        if known.get(name) != found.get(name)
    ]


def _until_refused(here: Scene) -> tuple[set[str], str]:
    """Names of the overrides that are taken, and the first refusal."""
    taken: set[str] = set()
    while not (refused := here.operator.refusal(f"o{len(taken)}")):
        # The file's last page may have room for some.
        taken.add(f"o{len(taken)}")
        assert len(taken) < 50, taken
    return taken, refused


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    disk = place / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise CannotInjectError("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


@fault("clock-set", f"{ON}; overrides end in their time")
def clock_set(place: Path, seen: Seen) -> None:
    """CLOCK_REALTIME of sidecar and agent a day ahead, two days back (libfaketime)."""
    faketime_library = next(Path("/").glob(_FAKETIME[1:]), None)
    if faketime_library is None:
        raise CannotInjectError("there is no libfaketime (Debian: apt-get install faketime)")
    clock = place / "clock"
    clock.write_text("+0")
    environment = {
        "LD_PRELOAD": str(faketime_library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with _environment(environment), scene(place, environment=environment) as here:
        for name, offset in (("ahead", _DAY_SECONDS), ("back", -_DAY_SECONDS)):
            moment = time.monotonic()
            here.operator.pin(f"{name}-short", seconds=_TTL_SECONDS)
            here.operator.pin(f"{name}-long")
            clock.write_text(f"{offset:+d}")
            shift = _clock_of(here) - time.time()
            seen.that(f"the sidecar's clock is {name}", abs(shift - offset) < 3600, shift)
            eventually(
                lambda name=name: f"{name}-short" not in here.operator.in_force(),  # type: ignore[misc]
                what="the short override ends",
            )
            took = time.monotonic() - moment
            seen.figure(f"override_of_{_TTL_SECONDS:.0f}_s_{name}_ended_after_seconds", took)
            seen.that("an override ends in its time", took >= _TTL_SECONDS, took)
            left = {h.override.override_id: h.remaining_seconds for h in here.operator.held()}
            seen.that(
                "others last on",
                left.keys() >= {PIN, f"{name}-long"} and min(left.values()) > 400,
                left,
            )
            went_on(here, seen, moment)
        seen.figure("leases_lost", here.drive.engine.link.status().lapses)


def _clock_of(here: Scene) -> float:
    """The sidecar's wall clock, Unix seconds."""
    return float(engines_at(here.sidecars.now.address).sidecar.now_unix_seconds)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for processes that inherit this environment: the agents."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@fault("half-a-profile", f"{ON}; refused by name at SIGHUP and at a start, taken when it is whole")
def half_a_profile(place: Path, seen: Seen) -> None:
    """Half of a profile's file appears in the directory that is read."""
    folder = place / "profiles"
    folder.mkdir()
    whole = make_profile().to_json()
    (folder / "whole.json").write_text(whole)
    with scene(place, "--profile", str(folder)) as here:
        moment = time.monotonic()
        half = folder / "half.json"
        half.write_text(whole[: len(whole) // 2])
        os.kill(here.sidecars.pid, signal.SIGHUP)
        eventually(
            lambda: "settings_not_reloaded" in here.sidecars.log.read_text(), what="it is refused"
        )
        line = next(
            line
            for line in here.sidecars.log.read_text().splitlines()
            if "settings_not_reloaded" in line
        )
        seen.that("SIGHUP refuses, and names the file", str(half) in line, line)
        went_on(here, seen, moment)
        other = controller(
            "serve", "--address", f"unix:{place}/other.sock", "--metrics-port", "0",
            "--profile", str(folder),
        )  # fmt: skip
        seen.that(
            "a start is refused with exit code 9, and names the file",
            other.returncode == Exit.BAD_FILE and str(half) in other.stderr,
            (other.returncode, other.stderr[-300:]),
        )
        half.write_text(whole)
        os.kill(here.sidecars.pid, signal.SIGHUP)
        eventually(lambda: "settings_reloaded" in here.sidecars.log.read_text(), what="it is taken")
        seen.that("written to its end, it is taken", True)
        went_on(here, seen, moment)


_OVERRIDES = 150
# One override in this many is cleared, so that there are tombstones, too.
_CLEARED_EVERY = 5
_SECTOR = 512
# SQLite's page size here, in bytes.
_PAGE = 4096

Damage = Callable[[bytearray, random.Random], None]
Content = tuple[Sequence[Entry], Sequence[AuditRecord]]


def _bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _zeros(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) // _SECTOR) * _SECTOR
    data[start : start + _SECTOR] = bytes(_SECTOR)


def _noise(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) // _SECTOR) * _SECTOR
    data[start : start + _SECTOR] = rng.randbytes(_SECTOR)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _swapped(data: bytearray, rng: random.Random) -> None:
    one, other = (number * _PAGE for number in rng.sample(range(len(data) // _PAGE), 2))
    first, second = data[one : one + _PAGE], data[other : other + _PAGE]
    data[one : one + _PAGE], data[other : other + _PAGE] = second, first


DAMAGES: dict[str, Damage] = {
    "a bit": _bit, "a sector of zeros": _zeros, "a sector of noise": _noise, "a cut": _cut,
    "two pages swapped": _swapped,
}  # fmt: skip


def damaged(count: int) -> Fault:
    """Makes the fault of `count` damages, each to a copy of one sound database."""

    def inject(place: Path, seen: Seen) -> None:
        rng = random.Random()
        sound = place / "sound"
        content = asyncio.run(_filled(sound))
        found: Counter[str] = Counter()
        wrong = []
        for number in range(count):
            kind = rng.choice(list(DAMAGES))
            copy = place / str(number)
            shutil.copytree(sound, copy)
            database = copy / "overrides.db"
            data = bytearray(database.read_bytes())
            DAMAGES[kind](data, rng)
            database.write_bytes(data)
            what = asyncio.run(_judged(copy, content))
            found[what] += 1
            if what == "wrong":
                wrong.append(kind)
            shutil.rmtree(copy)
        seen.that(
            f"{count} damaged databases: refused, or every override is there", not wrong, wrong
        )
        for what in ("refused at the start", "refused when read", "whole", "audit wrong", "wrong"):
            seen.figure(what.replace(" ", "_"), found[what])

    return Fault(
        "database-damaged",
        f"a bit, a sector, a page or the end of overrides.db changed, {count} copies",
        "refused with its name, or all that was acknowledged is there",
        inject,
        quick=True,
    )


async def _filled(folder: Path) -> Content:
    async with _store(folder) as store:
        for number in range(_OVERRIDES):
            entry = await store.write(f"o{number}", f'{{"gamma": {number % 8}}}', None, 0, _ANN)
            if number % _CLEARED_EVERY == 0:
                await store.clear(entry.override_id, entry.revision, _ANN)
        return await store.entries(), await store.audit(1000)


async def _judged(folder: Path, content: Content) -> str:
    """Says how a damaged copy behaves."""
    refused = "refused at the start"
    try:
        async with _store(folder) as store:
            refused = "refused when read"
            entries, audit = await store.entries(), await store.audit(1000)
    except StoreError:
        return refused
    if _plain(entries) != _plain(content[0]):
        return "wrong"
    return "whole" if list(audit) == list(content[1]) else "audit wrong"


def _plain(entries: Sequence[Entry]) -> set[tuple[str, int, str, str]]:
    """The fields of the entries that do not depend on the time."""
    return {(it.override_id, it.revision, it.body, it.ended) for it in entries}
