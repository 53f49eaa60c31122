"""A database of overrides that a disk has damaged: it is refused, or all of it is there."""

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from controller.store.file_store import FileStore
from controller.store.interface import Actor, AuditRecord, Entry, StoreError
from tools.faults.fault import Seen

_ANN = Actor("ann", "a fault is injected", "uid 1000")
_OVERRIDES = 150
# Every so many overrides one is cleared, so that there are tombstones, too.
_CLEARED_EVERY = 5
_SECTOR = 512
# Of SQLite here.
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


def damaged(count: int) -> Callable[[Path, Seen], None]:
    """An injection of so many damages, each to a copy of one sound database."""

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

    return inject


async def _filled(folder: Path) -> Content:
    store = FileStore(folder)
    await store.open(lambda: None)
    for number in range(_OVERRIDES):
        entry = await store.write(f"o{number}", f'{{"gamma": {number % 8}}}', None, 0, _ANN)
        if number % _CLEARED_EVERY == 0:
            await store.clear(entry.override_id, entry.revision, _ANN)
    found = await store.entries(), await store.audit(1000)
    await store.close()
    return found


async def _judged(folder: Path, content: Content) -> str:
    """Says what became of a damaged copy."""
    store = FileStore(folder)
    try:
        await store.open(lambda: None)
    except StoreError:
        return "refused at the start"
    try:
        entries, audit = await store.entries(), await store.audit(1000)
    except StoreError:
        return "refused when read"
    finally:
        await store.close()
    if _plain(entries) != _plain(content[0]):
        return "wrong"
    return "whole" if list(audit) == list(content[1]) else "audit wrong"


def _plain(entries: Sequence[Entry]) -> set[tuple[str, int, str, str]]:
    """What does not depend on the time."""
    return {(it.override_id, it.revision, it.body, it.ended) for it in entries}
