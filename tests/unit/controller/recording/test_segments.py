"""A segment's bytes: whatever happens to them, only what is whole before it is read."""

import contextlib
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.errors import SpeculationError
from controller.recording.recording import SegmentReader, find_recording
from controller.recording.replay import replay
from controller.recording.segments import (
    MAGIC,
    RECORDS_MAX,
    RecordingError,
    TornError,
    pack_frame,
    read_blocks,
)
from speculation.v1 import record_pb2
from tests.support.recorded_events import record, segments


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A segment of many frames."""
    directory = tmp_path_factory.mktemp("whole")
    record(directory, steps=120)
    [path] = segments(directory)
    records = [r for _, block in read_blocks(path.read_bytes()) for r in block.records]
    chunks = [records[:1], *(records[i : i + 40] for i in range(1, len(records), 40))]
    return MAGIC + b"".join(map(pack_frame, chunks))


def ends(data: bytes) -> list[int]:
    """Where the frames end."""
    frame_offsets = [offset for offset, _ in read_blocks(data)][1:]
    return [*frame_offsets, len(data)]


def moments_of(path: Path) -> tuple[list[object], str]:
    part = SegmentReader(path)
    return list(part.events()), part.damage


def test_a_torn_tail_is_passed_over_wherever_it_is_torn(whole: bytes, tmp_path: Path):
    path, frames = tmp_path / "x.record", ends(whole)
    path.write_bytes(whole)
    everything, damage = moments_of(path)
    assert damage == ""
    for cut in (*frames, *range(frames[0], len(whole), 41)):
        path.write_bytes(whole[:cut])
        part = SegmentReader(path)
        read = list(part.events())
        assert read == everything[: len(read)]
        complete = sum(end <= cut for end in frames) - 1
        assert len(read) == min(40 * complete, len(everything))
        assert part.is_torn == (cut not in frames)


@pytest.mark.parametrize("cut", [0, 5, len(MAGIC), len(MAGIC) + 3, 200])
def test_a_segment_without_its_opening_is_refused(whole: bytes, tmp_path: Path, cut: int):
    path = tmp_path / "x.record"
    path.write_bytes(whole[:cut])
    with pytest.raises(RecordingError, match=f"{path} cannot be read"):
        SegmentReader(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_ends_the_segment_and_loses_nothing_before_it(whole: bytes, data):
    frames = ends(whole)
    flipped_offset = data.draw(st.integers(frames[0], len(whole) - 1))
    broken = bytearray(whole)
    broken[flipped_offset] ^= 1 << data.draw(st.integers(0, 7))
    good = [block for _, block in read_blocks(whole)]
    read = []

    def read_all() -> None:
        for _, block in read_blocks(bytes(broken)):
            read.append(block)

    with pytest.raises(RecordingError):
        read_all()
    assert read == good[: sum(end <= flipped_offset for end in frames)]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.booleans(), st.booleans())
def test_random_bytes_are_a_typed_error(tmp_path_factory, noise, with_magic, as_frame):
    body = noise
    if as_frame:
        packed = zlib.compress(noise)
        body = struct.pack("<II", len(packed), zlib.crc32(packed)) + packed
    path = tmp_path_factory.mktemp("noise") / "x.record"
    path.write_bytes((MAGIC if with_magic else b"") + body)
    with pytest.raises(RecordingError):
        replay(find_recording(path))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_well_formed_nonsense_is_a_typed_error_or_read(whole: bytes, tmp_path_factory, data):
    """The checksum is right, the content is not: as a hostile file has it."""
    [(_, first), *rest] = read_blocks(whole)
    body = bytearray(first.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, len(body) - 1))
        body[offset] = data.draw(st.integers(0, 255))
    packed = zlib.compress(bytes(body))
    path = tmp_path_factory.mktemp("nonsense") / "x.record"
    path.write_bytes(
        MAGIC
        + struct.pack("<II", len(packed), zlib.crc32(packed))
        + packed
        + pack_frame(rest[0][1].records)
    )
    with contextlib.suppress(SpeculationError):
        replay(find_recording(path))


def test_a_bomb_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("controller.recording.segments._BLOCK_MAX", 10_000)
    packed = zlib.compress(bytes(20_000))
    data = MAGIC + struct.pack("<II", len(packed), zlib.crc32(packed)) + packed
    with pytest.raises(RecordingError, match="more than 10000 bytes"):
        list(read_blocks(data))


def test_a_small_file_does_not_become_a_large_one(tmp_path: Path):
    """Records of two bytes each, of which a few kB of zeros are millions."""
    for count, message in (
        (1 << 20, "more than 2048 records"),
        (5 << 20, "more than 8388608 bytes"),
    ):
        packed = zlib.compress(b"\x0a\x00" * count)
        path = tmp_path / "x.record"
        path.write_bytes(MAGIC + struct.pack("<II", len(packed), zlib.crc32(packed)) + packed)
        assert path.stat().st_size < 300_000
        with pytest.raises(RecordingError, match=message):
            replay(find_recording(path))


def test_what_is_written_is_read_however_much_it_is(monkeypatch: pytest.MonkeyPatch):
    records = [record_pb2.Record(clock_seconds=number) for number in range(2 * RECORDS_MAX + 1)]
    blocks_read = list(read_blocks(MAGIC + pack_frame(records)))
    assert [r for _, block in blocks_read for r in block.records] == records
    assert max(len(block.records) for _, block in blocks_read) <= RECORDS_MAX
    monkeypatch.setattr("controller.recording.segments._BLOCK_MAX", 1000)
    blocks_read = list(read_blocks(MAGIC + pack_frame(records[:500])))
    assert [r for _, block in blocks_read for r in block.records] == records[:500]


def test_a_device_is_no_recording():
    with pytest.raises(RecordingError, match="is not a regular file"):
        find_recording(Path("/dev/zero"))


def test_a_frame_of_no_possible_length_is_refused_at_once():
    with pytest.raises(RecordingError, match="a frame of 4294967295 bytes"):
        list(read_blocks(MAGIC + struct.pack("<II", 2**32 - 1, 0)))


def test_another_file_is_named_as_such(tmp_path: Path):
    path = tmp_path / "x.record"
    path.write_text("timestamp,tokens\n")
    with pytest.raises(RecordingError, match="not a recording"):
        find_recording(path)


def test_a_torn_first_line_is_torn():
    with pytest.raises(TornError):
        list(read_blocks(MAGIC[:7]))


def test_a_record_of_a_newer_version_ends_what_can_be_decided(whole: bytes, tmp_path: Path):
    path = tmp_path / "x.record"
    path.write_bytes(whole + pack_frame([record_pb2.Record(clock_seconds=1.0)]))
    everything, damage = moments_of(path)
    assert "of an unknown kind" in damage
    assert len(everything) > 100


def test_a_second_opening_is_no_segment(whole: bytes, tmp_path: Path):
    path = tmp_path / "x.record"
    [(_, first), *_] = read_blocks(whole)
    path.write_bytes(whole + pack_frame(first.records))
    assert moments_of(path)[1] == "a second opening"


def test_a_recording_of_another_format_is_refused_by_name(whole: bytes, tmp_path: Path):
    path = tmp_path / "engine-0@00000001.record"
    path.write_bytes(whole.replace(MAGIC, b"speculation-record/4\n", 1))
    message = "has format 4, and this version of the controller reads format 8 only"
    with pytest.raises(RecordingError, match=message):
        replay(find_recording(tmp_path))
    with pytest.raises(RecordingError, match=message):
        find_recording(path)


def test_a_segment_of_another_format_is_a_gap_among_others(whole: bytes, tmp_path: Path):
    older, newer = (tmp_path / f"engine-0@0000000{i}.record" for i in (1, 2))
    older.write_bytes(whole.replace(MAGIC, b"speculation-record/4\n", 1))
    newer.write_bytes(whole)
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    [(name, reason)] = verdict.gaps
    assert name == older.name
    assert "has format 4" in reason
