"""Small files that others write: read whole or refused in words, and looks that agree."""

import os
from pathlib import Path

import pytest

from controller.util.files import (
    MissingFileError,
    UnreadableFileError,
    WatchedFile,
    read_small,
)


def test_what_is_no_small_regular_file_is_refused_without_waiting(tmp_path: Path):
    fifo, large, loop = tmp_path / "fifo", tmp_path / "large", tmp_path / "loop"
    os.mkfifo(fifo)
    large.write_bytes(bytes(2049))
    loop.symlink_to(loop)
    for path, reason_pattern in (
        (fifo, "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (large, "larger than 2 KiB"),
        (loop, "symbolic links"),
        (large / "below", "Not a directory"),
        (Path("a\0b"), "is not a valid file name"),
        (Path("a\ud800b"), "is not a valid file name"),
    ):
        with pytest.raises(UnreadableFileError, match=reason_pattern) as caught:
            read_small(path, 2048)
        assert not isinstance(caught.value, MissingFileError)
    with pytest.raises(MissingFileError):
        read_small(tmp_path / "nowhere", 2048)
    assert len(read_small(large, 2049)) == 2049


def test_it_counts_the_looks_that_agree(tmp_path: Path):
    path = tmp_path / "file"
    watched = WatchedFile(path, 64)
    assert watched.read().is_missing
    assert watched.equal_reads == 1
    path.write_bytes(b"one")
    assert watched.read().content == b"one"
    assert watched.equal_reads == 1
    watched.read()
    assert watched.equal_reads == 2
    # Of the same size, and within the same tick of the file system's clock, perhaps.
    path.write_bytes(b"two")
    assert watched.read().content == b"two"
    assert watched.equal_reads == 1
    path.write_bytes(bytes(65))
    assert "larger" in watched.read().error
    assert not watched.snapshot.is_missing
    path.unlink()
    assert watched.read().is_missing
    assert watched.equal_reads == 1
