"""Packs records into segments, and keeps a ring of segments on disk.

A segment begins with a line that names its format, followed by frames of deflated blocks:

    length, CRC-32 (both of the deflated Block, little-endian, 32 bits)  deflated Block

A file that ends within a frame was truncated by a kill or a full disk; the frames before are valid.

    DIRECTORY/ENGINE@NUMBER.record     numbers increase by engine, over restarts too

The size of a directory is limited.  To make space, the oldest segment of the engine with the most
bytes is deleted, so that a busy engine does not displace the others.
"""

import contextlib
import errno
import fcntl
import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from controller.core.errors import SpeculationError
from speculation.v1 import record_pb2

_VERSION: Final = 8
MAGIC: Final = b"speculation-record/%d\n" % _VERSION
_FIRST_LINE = re.compile(rb"speculation-record/(\d{1,9})\n")
_HEAD = struct.Struct("<II")
# Largest inflated block that a reader accepts.  Half a second of an engine takes a few hundred kB,
# and an opening with the largest profile 1 MiB.  Parsed, a block takes up to 25 times its bytes.
_BLOCK_MAX = 8 * 1024 * 1024
# Largest deflated block, which can be slightly larger than the inflated one.
_FRAME_MAX = _BLOCK_MAX + 64 * 1024
# Most records of a block, for writers and readers.
RECORDS_MAX: Final = 2048
# Fast rather than small: the writer shares its CPU with an engine.
_LEVEL = 1
_NAME = re.compile(r"(?P<engine>[A-Za-z0-9._:-]{1,128})@(?P<number>\d{8,18})\.record")
# Segments of a ring that one engine uses alone, and the least number per engine.
_SEGMENTS = 32
_SEGMENTS_AN_ENGINE = 4
SEGMENT_BYTES_MIN = 64 * 1024


class RecordingError(SpeculationError):
    """A recording is missing or damaged, or the file is not a recording."""


class RecordDirectoryError(SpeculationError):
    """The directory of recordings cannot be used."""


class TornError(RecordingError):
    """A segment ends within a frame, as after a kill."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"at byte {position}: {reason}")


def pack_frame(records: Sequence[record_pb2.Record]) -> bytes:
    """Packs records into one frame, or into several if one would exceed a reader's limits."""
    size = sum(record.ByteSize() for record in records)
    if len(records) > 1 and (len(records) > RECORDS_MAX or size > _BLOCK_MAX // 2):
        half = len(records) // 2
        return pack_frame(records[:half]) + pack_frame(records[half:])
    packed = zlib.compress(record_pb2.Block(records=records).SerializeToString(), _LEVEL)
    return _HEAD.pack(len(packed), zlib.crc32(packed)) + packed


def read_blocks(data: bytes) -> Iterator[tuple[int, record_pb2.Block]]:
    """Yields (position, block) for every complete frame of a segment, in order.

    Raises RecordingError if the data is not a segment, and TornError for a truncated end.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise TornError(0, "its first line is incomplete")
        raise _format_error(data)
    position = len(MAGIC)
    while position < len(data):
        if len(data) - position < _HEAD.size:
            raise TornError(position, "it ends within a frame's header")
        length, check = _HEAD.unpack_from(data, position)
        packed = data[position + _HEAD.size : position + _HEAD.size + length]
        if length > _FRAME_MAX:
            raise RecordingError(f"at byte {position}: a frame of {length} bytes is too large")
        if len(packed) < length:
            raise TornError(position, "it ends within a frame")
        if zlib.crc32(packed) != check:
            raise RecordingError(f"at byte {position}: damaged (its checksum is wrong)")
        yield position, _decode_block(packed, position)
        position += _HEAD.size + length


def _format_error(data: bytes) -> RecordingError:
    """Explains why a segment with another first line is refused."""
    first_line = _FIRST_LINE.match(data)
    if first_line is None:
        return RecordingError("this is not a recording of a sidecar (its first line is different)")
    return RecordingError(
        f"this recording has format {int(first_line[1])}, and this version of the controller reads "
        f"format {_VERSION} only: replay it with the version of the controller that recorded it"
    )


def _decode_block(packed: bytes, position: int) -> record_pb2.Block:
    try:
        inflating = zlib.decompressobj()
        inflated = inflating.decompress(packed, _BLOCK_MAX)
        if not inflating.eof:
            raise RecordingError(
                f"at byte {position}: a block of more than {_BLOCK_MAX} bytes, or torn"
            )
        block = record_pb2.Block.FromString(inflated)
    except (zlib.error, DecodeError) as error:
        raise RecordingError(f"at byte {position}: an invalid block: {error}") from error
    if len(block.records) > RECORDS_MAX:
        raise RecordingError(f"at byte {position}: a block of more than {RECORDS_MAX} records")
    return block


@dataclass(slots=True, eq=False)
class Segment:
    """A file of the ring.  descriptor: -1 once it is complete.

    opening: bytes of the first line and the opening.  records: number of records after that.
    """

    path: Path
    engine_id: str
    number: int
    size: int
    descriptor: int = -1
    opening: int = 0
    records: int = 0


class SegmentRing:
    """All segments of one directory.  limit_bytes: their largest total size."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit = limit_bytes
        self._segments: dict[str, list[Segment]] = defaultdict(list)
        self._lock_file = -1
        self.bytes = 0

    def open(self) -> None:
        """Locks the directory and lists its segments.  Raises RecordDirectoryError."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock_file = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o640)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for segment in list_segments(self._directory):
                self._segments[segment.engine_id].append(segment)
                self.bytes += segment.size
            self._make_room(0)
        except BlockingIOError as error:
            self.close()
            raise RecordDirectoryError(
                f"{self._directory} is in use by another sidecar: give each its own directory"
            ) from error
        except OSError as error:
            self.close()
            raise RecordDirectoryError(
                f"{self._directory} cannot be used for recordings: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Ends all segments."""
        for segments in self._segments.values():
            for segment in segments:
                self.end(segment)
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def begin(self, engine_id: str, opening_frame: bytes) -> Segment:
        """Creates a segment with a first frame.  Raises OSError, and leaves no file then."""
        segments = self._segments[engine_id]
        number = segments[-1].number + 1 if segments else 1
        path = self._directory / f"{engine_id}@{number:08d}.record"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
        segment = Segment(path, engine_id, number, 0, descriptor)
        segments.append(segment)
        try:
            self.append(segment, MAGIC + opening_frame)
        except OSError:
            self.end(segment)
            self._remove(segment)
            raise
        segment.opening = segment.size
        return segment

    def append(self, segment: Segment, data: bytes) -> None:
        """Appends complete frames.  Raises OSError, and leaves the segment unchanged then."""
        self._make_room(len(data))
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(segment.descriptor, remaining) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(segment.descriptor, segment.size)
            raise
        segment.size += len(data)
        self.bytes += len(data)

    def end(self, segment: Segment) -> None:
        """Completes a segment."""
        if segment.descriptor >= 0:
            os.close(segment.descriptor)
            segment.descriptor = -1

    @property
    def segment_bytes(self) -> int:
        """Returns the size at which a new segment should begin."""
        writing = sum(s.descriptor >= 0 for segments in self._segments.values() for s in segments)
        room = min(self._limit // _SEGMENTS, self._limit // (_SEGMENTS_AN_ENGINE * writing or 1))
        return max(SEGMENT_BYTES_MIN, room)

    @property
    def segment_bytes_alone(self) -> int:
        """Returns the same for a ring with a single engine."""
        return max(SEGMENT_BYTES_MIN, self._limit // _SEGMENTS)

    def _make_room(self, size: int) -> None:
        while self.bytes + size > self._limit:
            bytes_by_engine = {
                engine_id: sum(s.size for s in segments)
                for engine_id, segments in self._segments.items()
                if any(s.descriptor < 0 for s in segments)
            }
            if not bytes_by_engine:
                raise OSError(
                    errno.EFBIG,
                    f"the limit of {self._limit // 1_000_000} MB is too small for the segments "
                    "being written: raise CONTROLLER_RECORD_MEGABYTES",
                )
            largest_engine = max(bytes_by_engine, key=lambda engine_id: bytes_by_engine[engine_id])
            self._remove(next(s for s in self._segments[largest_engine] if s.descriptor < 0))

    def _remove(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        self._segments[segment.engine_id].remove(segment)
        self.bytes -= segment.size
        if not self._segments[segment.engine_id]:
            del self._segments[segment.engine_id]


def list_segments(directory: Path) -> list[Segment]:
    """Returns the segments of a directory, by engine and number.  Raises OSError."""
    segments = []
    for entry in os.scandir(directory):
        name = _NAME.fullmatch(entry.name)
        if name is not None and entry.is_file(follow_symlinks=False):
            size = entry.stat(follow_symlinks=False).st_size
            path = directory / entry.name
            segments.append(Segment(path, name["engine"], int(name["number"]), size))
    return sorted(segments, key=lambda segment: (segment.engine_id, segment.number))
