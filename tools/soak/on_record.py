"""What a sidecar has on record of an engine, over all its sessions."""

from dataclasses import dataclass, field
from pathlib import Path

from controller.core.step_report import StepReport
from controller.recording.events import (
    Decided,
    Event,
    Forced,
    Noted,
    NoteKind,
    Overridden,
    Parted,
    Reported,
)
from controller.recording.recording import RecordingPart, find
from controller.recording.replay import ReplayClock, rebuilt
from controller.wire.plans import plan_to_proto
from speculation.v1 import plan_pb2


@dataclass(slots=True)
class Told:
    """A report, and the session that it was told in."""

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
        """In which anything was reported, in order."""
        return tuple(dict.fromkeys(told.session for told in self.told))


def read_record(directory: Path, engine_id: str) -> OnRecord:
    """Everything in a directory of segments.  Raises RecordingError where nothing can be read."""
    found = OnRecord()
    for path in find(directory, engine_id).paths:
        part = RecordingPart(path)
        opening = part.opening
        if opening.lost:
            found.gaps.append(f"{opening.lost} records were lost before {path.name}")
        _in_force(found, [term.override.override_id for term in opening.terms])
        # A session's first plan is older than its recording's first event.
        first = plan_to_proto(rebuilt(opening, ReplayClock()).current_plan())
        found.plans.setdefault((opening.session, first.epoch), first)
        for moment in part.moments():
            _take(found, opening.session, moment.event)
        if part.damage:
            found.gaps.append(f"{path.name}: {part.damage}")
    return found


def _take(found: OnRecord, session: int, event: Event) -> None:
    match event:
        case Reported():
            found.told.append(Told(session, event.report))
        case Decided(plan=plan) | Forced(plan=plan) | Parted(plan=plan) if plan is not None:
            found.plans[session, plan.epoch] = plan
        case Overridden():
            _in_force(found, [term.override.override_id for term in event.terms])
        case Noted(kind=NoteKind.DROPPED):
            found.dropped += event.count
        case Noted(kind=NoteKind.REJECTED):
            found.refused.append(event.text)


def _in_force(found: OnRecord, ids: list[str]) -> None:
    if not found.overrides or found.overrides[-1] != frozenset(ids):
        found.overrides.append(frozenset(ids))
