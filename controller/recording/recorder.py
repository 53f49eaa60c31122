"""Writes the queued events on a separate thread, so that steering never waits for the disk.

Every half second it writes the queued events, one frame per session.  When a segment is full, it
requests an opening (the core's state) from the session, with which the next segment begins.  A
write error is logged once.  Until an opening can be written again, events are dropped and counted.
"""

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog

from controller.core.clock import Clock
from controller.core.cost.profile import Profile
from controller.core.engine_spec import EngineSpec
from controller.core.planning.overrides import Override
from controller.core.settings import PlannerSettings
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.recording.recorded_controller import (
    Event,
    EventLog,
    OverrideEndTime,
    Queue,
    RecordedController,
)
from controller.recording.segments import RECORDS_MAX, Segment, SegmentRing, pack_frame
from controller.util.tasks import supervise_thread
from speculation.v1 import record_pb2

_ROUND_SECONDS = 0.5
# Interval of retries after a write error.
_RETRY_SECONDS: Final = 2.0
# Records that are made before other threads get the interpreter lock.
_RECORDS_PER_SLICE = 32
# Assumed bytes of a record on disk until it is measured: at the upper end of the usual size.
_RECORD_BYTES_ESTIMATE = 100
# Least number of records to measure it.
_MEASURED_RECORDS = 64

_log = structlog.get_logger(__name__)


class Recorder:
    """Records all sessions of a sidecar.

    limit_bytes: of the directory.  override_end_time: returns the end of an override, by its id.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        override_end_time: OverrideEndTime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._ring = SegmentRing(directory, limit_bytes)
        self._override_end_time = override_end_time
        self._wall = wall
        self._queue: Queue = deque()
        self._session = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._segments: dict[EventLog, Segment] = {}
        # Records that were dropped since the write error, by event log.
        self._dropped: dict[EventLog, int] = defaultdict(int)
        self._retry_at = 0.0
        self._is_failing = False

    def open(self) -> None:
        """Starts the thread.  Raises RecordDirectoryError."""
        self._ring.open()
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        return self._thread

    async def supervise(self) -> None:
        """Watches the thread; when it has ended, restarts it and raises TaskEndedError."""
        assert self._thread is not None
        await supervise_thread(self._thread, self._start)

    def close(self) -> None:
        """Writes the queued events, and ends the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._ring.close()

    def create_core(
        self,
        spec: EngineSpec,
        settings: PlannerSettings,
        profile: Profile | None,
        clock: Clock,
        training: TrainingSettings,
        *,
        overrides: Iterable[Override] = (),
        training_state: TrainingState | None = None,
    ) -> RecordedController:
        """Creates the core of a new session, with an event log of its own."""
        self._session = max(self._session + 1, int(self._wall() * 1000))
        event_log = EventLog(
            spec.engine_id, self._session, self._queue, self._override_end_time, self._wall
        )
        event_log.events_per_segment = self._ring.segment_bytes_alone // _RECORD_BYTES_ESTIMATE
        return RecordedController(
            spec,
            settings,
            profile,
            clock,
            training,
            event_log,
            overrides=overrides,
            training_state=training_state,
        )

    def _run(self) -> None:
        try:
            while not self._closing.wait(_ROUND_SECONDS):
                self._write_queued()
            self._write_queued()
        except Exception:  # noqa: BLE001  # a bug: it is logged, and steering continues
            _log.exception("recording_ended", directory=str(self._directory))
            self._drop_segments()

    def _drop_segments(self) -> None:
        """Makes every recording continue with an opening, because records may be lost."""
        for event_log in list(self._segments):
            self._dropped[event_log] += 1
            # A segment that cannot be ended is not written to again.
            with contextlib.suppress(OSError):
                self._end_segment(event_log)

    def _write_queued(self) -> None:
        # All events of these logs are in the queue by now.
        closed_logs = [
            event_log for event_log in {*self._segments, *self._dropped} if event_log.is_closed
        ]
        events_by_log: dict[EventLog, list[Event]] = {}
        for _ in range(len(self._queue)):
            event_log, event = self._queue.popleft()
            events_by_log.setdefault(event_log, []).append(event)
        for event_log, events in events_by_log.items():
            for start in range(0, len(events), RECORDS_MAX):
                self._write(event_log, events[start : start + RECORDS_MAX])
        for event_log in closed_logs:
            self._end_segment(event_log)
            self._dropped.pop(event_log, None)
        if self._dropped and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            for event_log in self._dropped:
                event_log.is_opening_due = True

    def _write(self, event_log: EventLog, events: Sequence[Event]) -> None:
        """Begins a segment with each opening, and appends all other records to the current one."""
        records: list[record_pb2.Record] = []
        for i, event in enumerate(events, 1):
            record = event()
            if record.HasField("opening"):
                self._append_records(event_log, records)
                self._begin_segment(event_log, record)
                records = []
            else:
                records.append(record)
            if i % _RECORDS_PER_SLICE == 0:
                time.sleep(0)
        self._append_records(event_log, records)

    def _begin_segment(self, event_log: EventLog, record: record_pb2.Record) -> None:
        self._end_segment(event_log)
        opening = record.opening
        lost_before = opening.lost
        opening.lost += self._dropped.get(event_log, 0)
        data = pack_frame([record])
        try:
            self._segments[event_log] = self._ring.begin(event_log.engine_id, data)
        except OSError as error:
            self._record_failure(event_log, lost_before + 1, error)
            return
        self._dropped.pop(event_log, None)
        if opening.lost:
            _log.warning("recording_gap", engine=event_log.engine_id, lost=opening.lost)
        if self._is_failing and not self._dropped:
            self._is_failing = False
            _log.info("recording_again", directory=str(self._directory))

    def _append_records(self, event_log: EventLog, records: Sequence[record_pb2.Record]) -> None:
        if not records:
            return
        segment = self._segments.get(event_log)
        if segment is None:
            self._dropped[event_log] += len(records)
        else:
            try:
                self._ring.append(segment, pack_frame(records))
            except OSError as error:
                self._record_failure(event_log, len(records), error)
            else:
                self._update_capacity(event_log, segment, len(records))

    def _update_capacity(self, event_log: EventLog, segment: Segment, records: int) -> None:
        """Estimates how many records fit into a segment, since many may come between two rounds."""
        segment_bytes = self._ring.segment_bytes
        segment.records += records
        if segment.records >= _MEASURED_RECORDS:
            record_bytes = (segment.size - segment.opening) / segment.records
            event_log.events_per_segment = max(
                _MEASURED_RECORDS, int((segment_bytes - segment.opening) / record_bytes)
            )
        event_log.is_opening_due = event_log.is_opening_due or segment.size >= segment_bytes

    def _end_segment(self, event_log: EventLog) -> None:
        segment = self._segments.pop(event_log, None)
        if segment is not None:
            self._ring.end(segment)

    def _record_failure(self, event_log: EventLog, lost: int, error: OSError) -> None:
        self._end_segment(event_log)
        self._dropped[event_log] += lost
        if not self._is_failing:
            self._is_failing = True
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            _log.error(
                "recording_failed", directory=str(self._directory), error=error.strerror,
                detail="steering continues; events are not recorded meanwhile",
            )  # fmt: skip
