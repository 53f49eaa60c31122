"""The blob store of one machine: a file for every source, `<kind>/<name>/<source>.json`."""

import asyncio
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from controller.core.errors import MALFORMED
from controller.store.interface import BLOB_NAMES, Blob, BlobKind, StoreUnavailableError
from controller.store.skipped_entries import SkippedEntries
from controller.util.atomic_file import write_whole

_T = TypeVar("_T")


class FileBlobStore:
    """Times are wall-clock seconds of this machine: files are read again after a restart."""

    def __init__(
        self,
        directory: Path,
        wall: Callable[[], float] = time.time,
        skipped: SkippedEntries | None = None,
    ) -> None:
        self._directory = directory
        self._skipped = skipped or SkippedEntries(str(directory))
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Implements the method of the store interface."""
        async with self._one_at_a_time:
            await self._run(lambda: self._put(kind, name, source, text))

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Implements the store interface; counts and omits a file that cannot be read."""
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
        write_whole(folder / f"{source}.json", body.encode())
        os.utime(folder)
        for _, path in self._items(kind, name)[kind.sources :]:
            path.unlink(missing_ok=True)
        for old in self._names(kind)[BLOB_NAMES:]:
            shutil.rmtree(old, ignore_errors=True)

    def _names(self, kind: BlobKind) -> list[Path]:
        folder = self._directory / kind.name
        if not folder.is_dir():
            return []
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)

    def _items(self, kind: BlobKind, name: str) -> list[tuple[Blob, Path]]:
        now, found = self._wall(), []
        for path in (self._directory / kind.name / name).glob("*.json"):
            try:
                body = json.loads(path.read_bytes())
                text, at = body["text"], float(body["at"])
                if not (isinstance(text, str) and math.isfinite(at)):
                    raise TypeError("a text and a time are needed")
                text.encode()  # half a surrogate pair can stand in JSON, and nowhere else
                item = Blob(path.stem, text, max(0.0, now - at))
            except (OSError, *MALFORMED) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._skipped.add(kind.name, [f"{name}/{path.name}"], reason or "")
                continue
            if kind.seconds is None or item.age_seconds < kind.seconds:
                found.append((item, path))
            else:
                path.unlink(missing_ok=True)
        return sorted(found, key=lambda pair: pair[0].age_seconds)
