"""Writes files that appear whole or not at all."""

import os
from pathlib import Path

_UNFINISHED = ".part"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a crash leaves the old or the new content.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_unfinished(directory: Path) -> None:
    """Removes unfinished files of killed processes from a directory and its subdirectories.

    No other process may be writing there.  Raises OSError.
    """
    for part in directory.rglob(f".*{_UNFINISHED}"):
        part.unlink(missing_ok=True)
