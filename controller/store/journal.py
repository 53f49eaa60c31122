"""An append-only file of checked lines: what was appended is there after a crash.

A line is 16 hexadecimal digits of the SHA-256 of what follows, a space, and a JSON object.

A last line that is torn or wrong was never acknowledged, and is cut off.  Anything wrong before the
last line is damage, and is refused.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from controller.store.port import StoreBrokenError, StoreUnavailableError
from controller.whole_file import write_whole

_CHECK = 16
_MODE = 0o640


class Journal:
    """One open journal.  Raises StoreBrokenError for damage, OSError for no access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        existed = path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
        try:
            self._size = self._whole()
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            if not existed:
                sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; everything appended is durable already."""
        os.close(self._file)

    def append(self, *records: dict[str, Any]) -> None:
        """Durable on return.  Raises StoreUnavailableError; the journal is as before then."""
        data = b"".join(map(_line, records))
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            # What a full disk took of a line must not stand before the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise StoreUnavailableError(
                f"{self._path} cannot be written: {error.strerror}; nothing was changed"
            ) from error
        self._size += len(data)

    def rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        """Holds these and no others; a crash leaves the old ones or the new.

        Raises OSError when nothing was changed, StoreUnavailableError when it cannot be opened
        afterwards.
        """
        data = b"".join(map(_line, records))
        write_whole(self._path, data)
        try:
            renewed = os.open(self._path, os.O_RDWR | os.O_APPEND)
            os.fchmod(renewed, _MODE)
        except OSError as error:
            raise StoreUnavailableError(f"{self._path}: {error.strerror}") from error
        os.close(self._file)
        self._file, self._size = renewed, len(data)

    def records(self) -> Iterator[dict[str, Any]]:
        """All records, oldest first."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                record = _record(line)
                if record is None:
                    raise self._damaged(number)
                yield record

    def _whole(self) -> int:
        """Bytes up to the end of the last good line."""
        size = 0
        with self._path.open("rb") as file:
            lines = file.readlines()
        for number, line in enumerate(lines, 1):
            if _record(line) is None:
                if number < len(lines):
                    raise self._damaged(number)
                break
            size += len(line)
        return size

    def _damaged(self, number: int) -> StoreBrokenError:
        return StoreBrokenError(
            f"{self._path}, line {number}: damaged (its checksum is wrong), and more follows it; "
            "restore the file or move it away"
        )


def sync_directory(path: Path) -> None:
    """Makes new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    return _sum(text) + b" " + text + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    check, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or check != _sum(text):
        return None
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"a record is no {type(found).__name__}")
    return found


def _sum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_CHECK].encode()
