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
from tools.faults.driving import PIN, LinkTestbed, list_engines, open_testbed
from tools.faults.fault import PLAN_CONTINUES, CannotInjectError, Fault, Observations, fault
from tools.faults.link_faults import check_plan_continues, check_steered_again, replace_agent

_DAY_SECONDS = 86_400
_FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
_TTL_SECONDS = 3.0
_ANN = Actor("ann", "a fault is injected", "uid 1000")
# Changes that a full disk refuses, before the next start.
_REFUSALS = 5
_CLEAR_SHARE = 0.2


@fault(
    "state-disk-full",
    f"{PLAN_CONTINUES}; overrides refused; what was acknowledged is there after a restart",
    quick=True,
)
def disk_full(place: Path, observations: Observations) -> None:
    """State and record directories on a tmpfs of 256 KiB that is filled."""
    with _small_disk(place) as disk:
        (disk / "state").mkdir()
        flags = ("--state-directory", f"{disk}/state")
        environment = {"CONTROLLER_RECORD_DIRECTORY": f"{disk}/records"}
        with open_testbed(place, *flags, environment=environment) as testbed:
            moment, choice_before = time.monotonic(), testbed.drive.current
            _fill(disk / "filler")
            acknowledged, refused = _pin_until_refused(testbed)
            observations.check(
                "an override is refused: “No space left”",
                "UNAVAILABLE" in refused and "No space left" in refused,
                refused,
            )
            # The ended session is written to the same disk.
            replace_agent(testbed)
            check_plan_continues(testbed, observations, moment)
            (disk / "filler").unlink()
            testbed.operator.pin("later")
            observations.check("with space again overrides are taken", True)
            acknowledged |= {PIN, "later"}
            check_steered_again(
                testbed, observations, testbed.sidecars.restart(), choice_before.session
            )
            active_ids = testbed.operator.active_override_ids()
            observations.check(
                "what was acknowledged, and no more", active_ids == acknowledged, active_ids
            )
            _fill(disk / "filler")
            testbed.sidecars.restart()
            active_ids = testbed.operator.active_override_ids()
            observations.check(
                "it starts on a full disk, too", active_ids == acknowledged, active_ids
            )


def disk_full_at_random(count: int) -> Fault:
    """Makes the fault of `count` disks that fill up at a random instant of a store's life."""

    def inject(place: Path, observations: Observations) -> None:
        rng = random.Random()
        problems: list[str] = []
        acknowledged = refused = 0
        with _small_disk(place) as disk:
            for _ in range(count):
                acknowledged_count, refusals, differences = asyncio.run(
                    _fill_during_life(disk, rng)
                )
                acknowledged, refused, problems = (
                    acknowledged + acknowledged_count,
                    refused + refusals,
                    problems + differences,
                )
        observations.check(
            f"{count} full disks: what was acknowledged, and no more", not problems, problems[:5]
        )
        observations.figure("changes_acknowledged", acknowledged)
        observations.figure("changes_refused", refused)
        observations.figure("lost_or_wrong", len(problems))

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


async def _fill_during_life(disk: Path, rng: random.Random) -> tuple[int, int, list[str]]:
    """Counts of acknowledged and of refused changes, and every difference from the former."""
    state, filler = disk / "state", disk / "filler"
    filler.write_bytes(b"\0" * rng.randrange(150_000))
    written: dict[str, tuple[int, str]] = {}
    acknowledged = refused = 0
    async with _store(state) as store:
        while refused < _REFUSALS:
            name = f"o{rng.randrange(40)}"
            try:
                revision = written[name][0] if name in written else None
                if revision is not None and rng.random() < _CLEAR_SHARE:
                    await store.clear(name, revision, _ANN)
                    del written[name]
                else:
                    body = "x" * rng.randrange(1, 3000)
                    written[name] = (
                        (await store.write(name, body, None, revision or 0, _ANN)).revision,
                        body,
                    )
                acknowledged += 1
            except ConflictError:
                continue  # it was cleared, and its id is not taken again
            except StoreUnavailableError:
                refused += 1
        differences = _find_differences("while it is full", await store.entries(), written)
    for situation in ("after a start on the full disk", "after a start with room"):
        async with _store(state) as store:
            differences += _find_differences(situation, await store.entries(), written)
        filler.unlink(missing_ok=True)
    shutil.rmtree(state)
    return acknowledged, refused, differences


def _find_differences(
    situation: str, entries: Sequence[Entry], acknowledged: dict[str, tuple[int, str]]
) -> list[str]:
    """Names the overrides that are not as they were acknowledged."""
    stored = {
        entry.override_id: (entry.revision, entry.body) for entry in entries if not entry.ended
    }
    return [
        f"{name} {situation}"
        for name in acknowledged.keys() | stored.keys()
        if acknowledged.get(name) != stored.get(name)
    ]


def _pin_until_refused(testbed: LinkTestbed) -> tuple[set[str], str]:
    """Names of the overrides that are taken, and the first refusal."""
    accepted: set[str] = set()
    while not (refused := testbed.operator.refusal(f"o{len(accepted)}")):
        # The file's last page may have room for some.
        accepted.add(f"o{len(accepted)}")
        assert len(accepted) < 50, accepted
    return accepted, refused


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


@fault("clock-set", f"{PLAN_CONTINUES}; overrides end in their time")
def clock_set(place: Path, observations: Observations) -> None:
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
    with _environment(environment), open_testbed(place, environment=environment) as testbed:
        for name, offset in (("ahead", _DAY_SECONDS), ("back", -_DAY_SECONDS)):
            moment = time.monotonic()
            testbed.operator.pin(f"{name}-short", seconds=_TTL_SECONDS)
            testbed.operator.pin(f"{name}-long")
            clock.write_text(f"{offset:+d}")
            shift = _read_clock(testbed) - time.time()
            observations.check(f"the sidecar's clock is {name}", abs(shift - offset) < 3600, shift)
            eventually(
                lambda name=name: f"{name}-short" not in testbed.operator.active_override_ids(),  # type: ignore[misc]
                description="the short override ends",
            )
            elapsed = time.monotonic() - moment
            observations.figure(
                f"override_of_{_TTL_SECONDS:.0f}_s_{name}_ended_after_seconds", elapsed
            )
            observations.check("an override ends in its time", elapsed >= _TTL_SECONDS, elapsed)
            remaining = {
                h.override.override_id: h.remaining_seconds
                for h in testbed.operator.list_overrides()
            }
            observations.check(
                "others last on",
                remaining.keys() >= {PIN, f"{name}-long"} and min(remaining.values()) > 400,
                remaining,
            )
            check_plan_continues(testbed, observations, moment)
        observations.figure("leases_lost", testbed.drive.engine.link.status().lapses)


def _read_clock(testbed: LinkTestbed) -> float:
    """The sidecar's wall clock, Unix seconds."""
    return float(list_engines(testbed.sidecars.current.address).sidecar.now_unix_seconds)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for processes that inherit this environment: the agents."""
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@fault(
    "half-a-profile",
    f"{PLAN_CONTINUES}; refused by name at SIGHUP and at a start, taken when it is whole",
)
def half_a_profile(place: Path, observations: Observations) -> None:
    """Half of a profile's file appears in the directory that is read."""
    folder = place / "profiles"
    folder.mkdir()
    profile_text = make_profile().to_json()
    (folder / "whole.json").write_text(profile_text)
    with open_testbed(place, "--profile", str(folder)) as testbed:
        moment = time.monotonic()
        partial_file = folder / "half.json"
        partial_file.write_text(profile_text[: len(profile_text) // 2])
        os.kill(testbed.sidecars.pid, signal.SIGHUP)
        eventually(
            lambda: "settings_not_reloaded" in testbed.sidecars.log.read_text(),
            description="it is refused",
        )
        line = next(
            line
            for line in testbed.sidecars.log.read_text().splitlines()
            if "settings_not_reloaded" in line
        )
        observations.check("SIGHUP refuses, and names the file", str(partial_file) in line, line)
        check_plan_continues(testbed, observations, moment)
        second_start = controller(
            "serve", "--address", f"unix:{place}/other.sock", "--metrics-port", "0",
            "--profile", str(folder),
        )  # fmt: skip
        observations.check(
            "a start is refused with exit code 9, and names the file",
            second_start.returncode == Exit.BAD_FILE and str(partial_file) in second_start.stderr,
            (second_start.returncode, second_start.stderr[-300:]),
        )
        partial_file.write_text(profile_text)
        os.kill(testbed.sidecars.pid, signal.SIGHUP)
        eventually(
            lambda: "settings_reloaded" in testbed.sidecars.log.read_text(),
            description="it is taken",
        )
        observations.check("written to its end, it is taken", True)
        check_plan_continues(testbed, observations, moment)


_OVERRIDES = 150
# One override in this many is cleared, so that there are tombstones, too.
_CLEAR_INTERVAL = 5
_SECTOR = 512
# SQLite's page size here, in bytes.
_PAGE = 4096

Damage = Callable[[bytearray, random.Random], None]
Content = tuple[Sequence[Entry], Sequence[AuditRecord]]


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _zero_sector(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) // _SECTOR) * _SECTOR
    data[start : start + _SECTOR] = bytes(_SECTOR)


def _randomize_sector(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) // _SECTOR) * _SECTOR
    data[start : start + _SECTOR] = rng.randbytes(_SECTOR)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _swap_pages(data: bytearray, rng: random.Random) -> None:
    first_offset, second_offset = (
        number * _PAGE for number in rng.sample(range(len(data) // _PAGE), 2)
    )
    first, second = (
        data[first_offset : first_offset + _PAGE],
        data[second_offset : second_offset + _PAGE],
    )
    data[first_offset : first_offset + _PAGE], data[second_offset : second_offset + _PAGE] = (
        second,
        first,
    )


DAMAGES: dict[str, Damage] = {
    "a bit": _flip_bit, "a sector of zeros": _zero_sector, "a sector of noise": _randomize_sector,
    "a cut": _truncate,
    "two pages swapped": _swap_pages,
}  # fmt: skip


def database_damaged(count: int) -> Fault:
    """Makes the fault of `count` damages, each to a copy of one sound database."""

    def inject(place: Path, observations: Observations) -> None:
        rng = random.Random()
        sound = place / "sound"
        content = asyncio.run(_write_sound_database(sound))
        outcomes: Counter[str] = Counter()
        wrong = []
        for number in range(count):
            kind = rng.choice(list(DAMAGES))
            copy = place / str(number)
            shutil.copytree(sound, copy)
            database = copy / "overrides.db"
            data = bytearray(database.read_bytes())
            DAMAGES[kind](data, rng)
            database.write_bytes(data)
            outcome = asyncio.run(_classify(copy, content))
            outcomes[outcome] += 1
            if outcome == "wrong":
                wrong.append(kind)
            shutil.rmtree(copy)
        observations.check(
            f"{count} damaged databases: refused, or every override is there", not wrong, wrong
        )
        for outcome in (
            "refused at the start",
            "refused when read",
            "whole",
            "audit wrong",
            "wrong",
        ):
            observations.figure(outcome.replace(" ", "_"), outcomes[outcome])

    return Fault(
        "database-damaged",
        f"a bit, a sector, a page or the end of overrides.db changed, {count} copies",
        "refused with its name, or all that was acknowledged is there",
        inject,
        quick=True,
    )


async def _write_sound_database(folder: Path) -> Content:
    async with _store(folder) as store:
        for number in range(_OVERRIDES):
            entry = await store.write(f"o{number}", f'{{"gamma": {number % 8}}}', None, 0, _ANN)
            if number % _CLEAR_INTERVAL == 0:
                await store.clear(entry.override_id, entry.revision, _ANN)
        return await store.entries(), await store.audit(1000)


async def _classify(folder: Path, content: Content) -> str:
    """Says how a damaged copy behaves."""
    refused = "refused at the start"
    try:
        async with _store(folder) as store:
            refused = "refused when read"
            entries, audit = await store.entries(), await store.audit(1000)
    except StoreError:
        return refused
    if _comparable(entries) != _comparable(content[0]):
        return "wrong"
    return "whole" if list(audit) == list(content[1]) else "audit wrong"


def _comparable(entries: Sequence[Entry]) -> set[tuple[str, int, str, str]]:
    """The fields of the entries that do not depend on the time."""
    return {(entry.override_id, entry.revision, entry.body, entry.ended) for entry in entries}
