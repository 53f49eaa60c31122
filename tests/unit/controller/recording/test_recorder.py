"""What the recorder keeps on disk, within its bounds, and what it does when it cannot."""

import errno
import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controller.core.planning.overrides import Rule
from controller.recording import recorded_controller as tape_module
from controller.recording import recorder as module
from controller.recording import segments as ring_module
from controller.recording.recorder import Recorder
from controller.recording.recording import SegmentReader, find_recording
from controller.recording.replay import replay
from controller.recording.segments import RecordDirectoryError
from controller.util import tasks as supervisor_module
from controller.util.tasks import Supervisor
from speculation.v1 import record_pb2
from tests.support.eventually import eventually
from tests.support.recorded_events import (
    engine,
    flush,
    full_spec,
    override,
    record,
    recorder,
    segments,
)
from tests.support.service_harness import wait_until


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that are full after some steps, and written when a test demands it."""
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES_MIN", 6_000)
    monkeypatch.setattr(module, "_ROUND_SECONDS", 3600.0)


def test_the_ring_holds_its_bound_and_decides_the_same_without_its_beginning(tmp_path, small):
    limit = 60_000
    with recorder(tmp_path, limit) as live_recorder:
        running = engine(live_recorder)
        for batch_size in (1, 4, 16, 2) * 7:
            running.run(60, batch_size, acceptance=0.3 + 0.1 * (batch_size % 5))
            flush(live_recorder)
            assert sum(p.stat().st_size for p in segments(tmp_path)) <= limit
    paths = segments(tmp_path)
    assert not paths[0].name.endswith("@00000001.record")
    assert len(paths) > 3
    verdict = replay(find_recording(tmp_path))
    assert (verdict.is_same, verdict.gaps, verdict.lost) == (True, [], 0)
    assert verdict.states == len(paths) - 1
    assert 0 < verdict.reports < running.step
    assert replay(find_recording(paths[2])).is_same


def test_one_busy_engine_does_not_push_the_others_out(tmp_path, small):
    with recorder(tmp_path, 60_000) as live_recorder:
        quiet = engine(live_recorder, full_spec("quiet"))
        quiet.run(20)
        quiet.core.note(record_pb2.RECORD_NOTE_KIND_ENDED)
        busy = engine(live_recorder, full_spec("busy"))
        for _ in range(20):
            busy.run(60)
            flush(live_recorder)
    assert replay(find_recording(tmp_path, "quiet")).reports == 20
    assert not (tmp_path / "busy@00000001.record").exists()


def test_numbers_go_on_after_a_restart_and_the_bound_holds_at_once(tmp_path, small):
    record(tmp_path, steps=400)
    before = segments(tmp_path)
    record(tmp_path, steps=30, seed=1)
    after = segments(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
    verdict = replay(find_recording(tmp_path))
    assert (verdict.sessions, verdict.reports, verdict.is_same) == (2, 430, True)
    with recorder(tmp_path, 20_000):
        assert sum(p.stat().st_size for p in segments(tmp_path)) <= 20_000


def test_what_does_not_fit_the_queue_is_a_marked_gap(tmp_path, small, monkeypatch):
    monkeypatch.setattr(tape_module, "QUEUE_MAX", 50)
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder)
        flush(live_recorder)
        running.run(200)
        lost = running.core._event_log.lost_events
        assert lost > 100
        flush(live_recorder)
        running.run(5)
        flush(live_recorder)
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    assert verdict.lost == lost
    assert [reason for _, reason in verdict.gaps] == [f"{lost} records before it were lost"]
    assert verdict.reports < 205


class FullDisk:
    """Stands where `os.write` does, and is full after `size` bytes."""

    def __init__(self) -> None:
        self.room: int | None = None

    def __call__(self, descriptor: int, data: memoryview) -> int:
        if self.room is None:
            return os_write(descriptor, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os_write(descriptor, data[: self.room])
        self.room -= taken
        return taken


os_write = os.write


def test_a_full_disk_is_said_once_leaves_no_half_frame_and_is_tried_again(
    tmp_path, small, monkeypatch
):
    disk = FullDisk()
    monkeypatch.setattr(os, "write", disk)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    with capture_logs() as logs, recorder(tmp_path) as live_recorder:
        running = engine(live_recorder)
        running.run(50)
        flush(live_recorder)
        disk.room = 100
        for _ in range(5):
            running.run(20)
            flush(live_recorder)
        assert live_recorder._is_failing
        plans = running.plan.epoch
        disk.room = None

        def goes_on() -> bool | None:
            running.run(1)
            flush(live_recorder)
            return not live_recorder._is_failing or None

        eventually(goes_on, description="recording again")
        running.run(600)
        assert running.plan.epoch > plans
    assert [line["event"] for line in logs] == [
        "recording_failed", "recording_gap", "recording_again",
    ]  # fmt: skip
    assert logs[0]["error"] == "No space left on device"
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    assert verdict.lost == logs[1]["lost"] > 0
    assert verdict.reports + verdict.lost >= running.step
    assert all(not SegmentReader(path).damage for path in segments(tmp_path))
    for path in segments(tmp_path):
        part = SegmentReader(path)
        assert list(part.events())
        assert part.damage == ""


def test_more_engines_than_the_bound_has_room_for_are_said(tmp_path, small):
    with capture_logs() as logs, recorder(tmp_path, 15_000) as live_recorder:
        running = [engine(live_recorder, full_spec(f"engine-{i}")) for i in range(6)]
        for one in running:
            one.run(40)
        flush(live_recorder)
    assert logs[0]["event"] == "recording_failed"
    assert "CONTROLLER_RECORD_MEGABYTES" in logs[0]["error"]
    assert sum(p.stat().st_size for p in segments(tmp_path)) <= 15_000


def test_a_directory_is_one_sidecars(tmp_path):
    with recorder(tmp_path), pytest.raises(RecordDirectoryError, match="another sidecar"):
        Recorder(tmp_path, 1_000_000, lambda _: None).open()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordDirectoryError, match="cannot be used for recordings"):
        Recorder(tmp_path / "file", 1_000_000, lambda _: None).open()


def test_nothing_is_written_on_the_thread_that_steers(tmp_path, monkeypatch):
    writers = set()

    def write(descriptor: int, data: memoryview) -> int:
        writers.add(threading.get_ident())
        return os_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    record(tmp_path)
    assert writers
    assert threading.get_ident() not in writers


def test_after_its_end_a_session_takes_nothing_more(tmp_path):
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder)
        running.run(10)
        running.core.note(record_pb2.RECORD_NOTE_KIND_ENDED, text="over")
        running.core.note(record_pb2.RECORD_NOTE_KIND_STREAM_CLOSED)
        running.run(1)
    [path] = segments(tmp_path)
    last = list(SegmentReader(path).events())[-1]
    assert last.record.note.text == "over"
    assert replay(find_recording(tmp_path)).is_same


def test_overrides_are_kept_with_their_ends(tmp_path):
    ends = {"a": 2e9}
    with recorder(tmp_path, end_of=ends.get) as live_recorder:
        running = engine(live_recorder)
        rule = [override("a", Rule(gamma=1)), override("b", Rule(off=True))]
        running.core.set_overrides(rule)
        running.core.set_overrides(rule)
        ends["a"] = 2e9 + 60
        running.core.set_overrides(rule)
    [path] = segments(tmp_path)
    kept = [m.record.overrides for m in SegmentReader(path).events() if m.kind == "overrides"]
    assert [[(t.override.override_id, t.ends_at) for t in it.overrides] for it in kept] == [
        [("a", 2e9), ("b", 0)],
        [("a", 2e9 + 60), ("b", 0)],
    ]
    assert not any(it.overrides[1].HasField("ends_at") for it in kept)
    assert replay(find_recording(tmp_path)).is_same


def test_half_folded_is_lost(tmp_path, monkeypatch):
    """A step that breaks the core in the middle cannot be done again: the record states it."""
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder)
        running.run(30)

        def broken(*_: object) -> None:
            raise FloatingPointError

        with monkeypatch.context() as patch:
            patch.setattr(running.core.cost_model, "predict", broken)
            with pytest.raises(FloatingPointError):
                running.run(1)
        running.run(30)
    verdict = replay(find_recording(tmp_path))
    assert (verdict.is_same, verdict.lost, verdict.reports) == (True, 1, 60)


def test_a_segment_that_is_missing_is_a_gap(tmp_path: Path, small):
    with recorder(tmp_path, 180_000) as live_recorder:
        running = engine(live_recorder)
        for _ in range(8):
            running.run(60)
            flush(live_recorder)
    paths = segments(tmp_path)
    assert len(paths) > 4
    paths[2].unlink()
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    assert verdict.gaps == [(paths[3].name, "the segment before it is missing")]


async def test_a_recorder_whose_thread_fails_records_again_and_tells_the_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROUND_SECONDS", 0.01)
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_SECONDS", 0.01)
    write, failures = Recorder._write, [ValueError("moments that cannot be packed")]

    def fail_once(self, event_log, moments):
        if failures and segments(tmp_path):
            raise failures.pop()
        write(self, event_log, moments)

    monkeypatch.setattr(Recorder, "_write", fail_once)
    supervisor = Supervisor()
    with capture_logs() as logs, recorder(tmp_path) as live_recorder:
        supervisor.run("recorder", live_recorder.supervise)
        running = engine(live_recorder)

        def recorded_again() -> bool:
            running.run(10)
            return len(segments(tmp_path)) > 1

        await wait_until(recorded_again)
        await supervisor.stop()
    events = [line["event"] for line in logs]
    assert events[:2] == ["recording_ended", "task_failed"]
    assert "recording_gap" in events
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    assert verdict.lost
