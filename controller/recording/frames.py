"""A segment's bytes: a line that says what it is, then checked frames of deflated blocks.

    length, CRC-32 (both of what follows, little-endian, 32 bits)  deflated Block

A file that ends within a frame was torn, by a kill or a full disk; what is before it is whole.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from controller.recording.errors import RecordingError
from speculation.v1 import record_pb2

_VERSION: Final = 8
MAGIC: Final = b"speculation-record/%d\n" % _VERSION
_FIRST_LINE = re.compile(rb"speculation-record/(\d{1,9})\n")
_HEAD = struct.Struct("<II")
# Bytes of a plain block, above which no reader takes one: half a second of an engine has some
# hundred kB, and an opening with the largest profile that a sidecar takes 1 MiB.  Its messages take
# up to 25 times as much memory, whatever they are.
_BLOCK_MAX = 8 * 1024 * 1024
# Of a deflated one, which can be a little larger than what it was made of.
_FRAME_MAX = _BLOCK_MAX + 64 * 1024
# Records of a block, which a writer makes no larger either.
RECORDS_MAX: Final = 2048
# Quick rather than small: the writer shares its processor with an engine.
_LEVEL = 1


def frame(records: Sequence[record_pb2.Record]) -> bytes:
    """Packs records into one frame, or into several where a reader would not take one."""
    size = sum(record.ByteSize() for record in records)
    if len(records) > 1 and (len(records) > RECORDS_MAX or size > _BLOCK_MAX // 2):
        half = len(records) // 2
        return frame(records[:half]) + frame(records[half:])
    packed = zlib.compress(record_pb2.Block(records=records).SerializeToString(), _LEVEL)
    return _HEAD.pack(len(packed), zlib.crc32(packed)) + packed


def blocks(data: bytes) -> Iterator[tuple[int, record_pb2.Block]]:
    """(where it begins, block) of every whole frame of a segment, in order.

    Raises RecordingError where the bytes are no segment's; for a torn end TornError.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise TornError(0, "its first line is not whole")
        raise _not_read(data)
    at = len(MAGIC)
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise TornError(at, "it ends within a frame's head")
        length, check = _HEAD.unpack_from(data, at)
        packed = data[at + _HEAD.size : at + _HEAD.size + length]
        if length > _FRAME_MAX:
            raise RecordingError(f"at byte {at}: a frame of {length} bytes")
        if len(packed) < length:
            raise TornError(at, "it ends within a frame")
        if zlib.crc32(packed) != check:
            raise RecordingError(f"at byte {at}: damaged (its checksum is wrong)")
        yield at, _block(packed, at)
        at += _HEAD.size + length


def _not_read(data: bytes) -> RecordingError:
    """Explains why a segment with another first line is refused."""
    known = _FIRST_LINE.match(data)
    if known is None:
        return RecordingError("this is no recording of a sidecar (its first line is another one)")
    return RecordingError(
        f"this recording has format {int(known[1])}, and this version of the controller reads "
        f"format {_VERSION} only: replay it with the version of the controller that recorded it"
    )


class TornError(RecordingError):
    """A segment that ends within a frame, as a kill leaves it."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(f"at byte {at}: {why}")


def _block(packed: bytes, at: int) -> record_pb2.Block:
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(packed, _BLOCK_MAX)
        if not inflating.eof:
            raise RecordingError(f"at byte {at}: a block of more than {_BLOCK_MAX} bytes, or torn")
        block = record_pb2.Block.FromString(plain)
    except (zlib.error, DecodeError) as error:
        raise RecordingError(f"at byte {at}: no block: {error}") from error
    if len(block.records) > RECORDS_MAX:
        raise RecordingError(f"at byte {at}: a block of more than {RECORDS_MAX} records")
    return block
