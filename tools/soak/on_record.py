"""Reads what a sidecar has recorded of an engine, over all its sessions."""

from dataclasses import dataclass, field
from pathlib import Path

from controller.core.step_report import StepReport
from controller.recording.recording import Moment, RecordingPart, find
from controller.recording.replay import ReplayClock, rebuilt
from controller.wire.plans import plan_to_proto
from speculation.v1 import plan_pb2, record_pb2


@dataclass(slots=True)
class Told:
    """A report, and the session in which it was sent."""

    session: int
    report: StepReport


@dataclass(slots=True)
class OnRecord:
    """plans: by session and epoch.  dropped: reports that the link has counted as lost.

    refused: what was wrong with a report.  gaps: why a part of the recording is missing.
    overrides: ids that were in force, one entry for every change.
    """

    told: list[Told] = field(default_factory=list)
    plans: dict[tuple[int, int], plan_pb2.Plan] = field(default_factory=dict)
    dropped: int = 0
    refused: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    overrides: list[frozenset[str]] = field(default_factory=list)

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions with reports, in order."""
        return tuple(dict.fromkeys(told.session for told in self.told))


def read_record(directory: Path, engine_id: str) -> OnRecord:
    """Everything in a directory of segments.  Raises RecordingError where nothing can be read."""
    found = OnRecord()
    for path in find(directory, engine_id).paths:
        part = RecordingPart(path)
        opening = part.opening.message
        if opening.lost:
            found.gaps.append(f"{opening.lost} records were lost before {path.name}")
        _in_force(found, opening.overrides)
        # A session's first plan is older than its recording's first event.
        first = plan_to_proto(rebuilt(part.opening, ReplayClock()).current_plan())
        found.plans.setdefault((opening.session, first.epoch), first)
        for moment in part.moments():
            _take(found, opening.session, moment)
        if part.damage:
            found.gaps.append(f"{path.name}: {part.damage}")
    return found


def _take(found: OnRecord, session: int, moment: Moment) -> None:
    note = moment.record.note
    if moment.kind == "report":
        found.told.append(Told(session, moment.told[0]))
    elif moment.plan is not None:
        found.plans[session, moment.plan.epoch] = moment.plan
    elif moment.kind == "overrides":
        _in_force(found, moment.record.overrides)
    elif note.kind == record_pb2.RECORD_NOTE_KIND_DROPPED:
        found.dropped += note.count
    elif note.kind == record_pb2.RECORD_NOTE_KIND_REJECTED:
        found.refused.append(note.text)


def _in_force(found: OnRecord, terms: record_pb2.RecordOverrides) -> None:
    ids = frozenset(term.override.override_id for term in terms.overrides)
    if not found.overrides or found.overrides[-1] != ids:
        found.overrides.append(ids)
