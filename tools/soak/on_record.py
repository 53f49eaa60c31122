"""Reads what a sidecar has recorded of an engine, over all its sessions."""

from dataclasses import dataclass, field
from pathlib import Path

from controller.core.step_report import StepReport
from controller.recording.recording import RecordedEvent, SegmentReader, find_recording
from controller.recording.replay import ReplayClock, rebuild_core
from controller.wire.plans import plan_to_proto
from speculation.v1 import plan_pb2, record_pb2


@dataclass(slots=True)
class RecordedReport:
    """A report, and the session in which it was sent."""

    session: int
    report: StepReport


@dataclass(slots=True)
class RecordedEngine:
    """The records of one engine.  plans: by session and epoch.  dropped: reports lost on the link.

    refused: what was wrong with a report.  gaps: why a part of the recording is missing.
    overrides: ids that were in force, one entry for every change.
    """

    reports: list[RecordedReport] = field(default_factory=list)
    plans: dict[tuple[int, int], plan_pb2.Plan] = field(default_factory=dict)
    dropped: int = 0
    refused: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    overrides: list[frozenset[str]] = field(default_factory=list)

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions with reports, in order."""
        return tuple(dict.fromkeys(recorded.session for recorded in self.reports))


def read_record(directory: Path, engine_id: str) -> RecordedEngine:
    """Everything in a directory of segments.  Raises RecordingError where nothing can be read."""
    record = RecordedEngine()
    for path in find_recording(directory, engine_id).paths:
        part = SegmentReader(path)
        opening = part.opening.message
        if opening.lost:
            record.gaps.append(f"{opening.lost} records were lost before {path.name}")
        _note_overrides(record, opening.overrides)
        # A session's first plan is older than its recording's first event.
        first = plan_to_proto(rebuild_core(part.opening, ReplayClock()).current_plan())
        record.plans.setdefault((opening.session, first.epoch), first)
        for moment in part.events():
            _add_moment(record, opening.session, moment)
        if part.damage:
            record.gaps.append(f"{path.name}: {part.damage}")
    return record


def _add_moment(record: RecordedEngine, session: int, moment: RecordedEvent) -> None:
    note = moment.record.note
    if moment.kind == "report":
        record.reports.append(RecordedReport(session, moment.arguments[0]))
    elif moment.plan is not None:
        record.plans[session, moment.plan.epoch] = moment.plan
    elif moment.kind == "overrides":
        _note_overrides(record, moment.record.overrides)
    elif note.kind == record_pb2.RECORD_NOTE_KIND_DROPPED:
        record.dropped += note.count
    elif note.kind == record_pb2.RECORD_NOTE_KIND_REJECTED:
        record.refused.append(note.text)


def _note_overrides(record: RecordedEngine, terms: record_pb2.RecordOverrides) -> None:
    ids = frozenset(term.override.override_id for term in terms.overrides)
    if not record.overrides or record.overrides[-1] != ids:
        record.overrides.append(ids)
