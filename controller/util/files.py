"""Writes files atomically, and reads small files that other programs write.

Another program may still be writing a file: an editor truncates it first, and a copy grows.  A
changed content is therefore used only after consecutive reads have returned the same content.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PARTIAL_SUFFIX = ".part"
# Consecutive equal reads after which a change is used.
EQUAL_READS_MIN: Final = 2
# Seconds between reads.  A change is used within a second: after at most two pauses.
POLL_SECONDS: Final = 0.4


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a crash leaves the old or the new content.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL_SUFFIX}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes new names in a directory durable.  Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_partial_files(directory: Path) -> None:
    """Removes unfinished files of killed processes from a directory and its subdirectories.

    No other process may be writing there.  Raises OSError.
    """
    for part in directory.rglob(f".*{_PARTIAL_SUFFIX}"):
        part.unlink(missing_ok=True)


class UnreadableFileError(Exception):
    """A file that cannot be read; the message says why and does not name the file."""


class MissingFileError(UnreadableFileError):
    """The file does not exist."""


def read_small(path: Path, bytes_max: int) -> bytes:
    """Reads a regular file of at most `bytes_max` bytes.

    Raises UnreadableFileError, and MissingFileError if there is no such file.  Never blocks: a
    named pipe is refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingFileError(error.strerror) from error
    except OSError as error:
        raise UnreadableFileError(error.strerror or "cannot be read") from error
    except ValueError as error:  # a NUL or a lone surrogate in it
        raise UnreadableFileError("is not a valid file name") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFileError("not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise UnreadableFileError(error.strerror or "cannot be read") from error
    finally:
        os.close(descriptor)
    if len(content) > bytes_max:
        raise UnreadableFileError(f"the file is larger than {bytes_max // 1024} KiB")
    return content


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """Result of one read of a file.

    content: b"" if it cannot be read.  error: why it cannot be read, "" if it can.
    """

    content: bytes = b""
    error: str = ""
    is_missing: bool = False


class WatchedFile:
    """Reads one file repeatedly.

    snapshot: by the last read.  equal_reads: consecutive reads with this result, the last one
    included.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self.snapshot = FileSnapshot()
        self.equal_reads = 0

    def read(self) -> FileSnapshot:
        """Reads the file.  Raises nothing: a failed read is a result too."""
        try:
            new_snapshot = FileSnapshot(read_small(self.path, self._bytes_max))
        except MissingFileError as error:
            new_snapshot = FileSnapshot(error=str(error), is_missing=True)
        except UnreadableFileError as error:
            new_snapshot = FileSnapshot(error=str(error))
        self.equal_reads = self.equal_reads + 1 if new_snapshot == self.snapshot else 1
        self.snapshot = new_snapshot
        return new_snapshot
