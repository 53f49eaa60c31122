"""Events between values and proto, both ways.

`moment_from_proto` raises RecordingError for everything that cannot be.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from controller.core.acceptance import warm_start
from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from controller.core.errors import MALFORMED, SpeculationError
from controller.core.settings import PlannerSettings
from controller.core.training import selective_training
from controller.core.training.selective_training import TrainingSettings
from controller.recording.checkpoint_messages import state_from_proto, state_to_proto
from controller.recording.errors import RecordingError
from controller.recording.events import (
    Configured,
    Decided,
    Event,
    Forced,
    Issued,
    Lost,
    Moment,
    Noted,
    NoteKind,
    Opening,
    Overridden,
    Parted,
    Profiled,
    Reported,
    Term,
    Trained,
    Warmed,
)
from controller.wire.capabilities import all_lost_from_proto, lost_to_proto
from controller.wire.engines import engine_from_proto, engine_to_proto
from controller.wire.field_mapping import message_of, value_of
from controller.wire.overrides import override_from_proto, override_to_proto
from controller.wire.plans import plan_to_proto
from controller.wire.reports import report_from_proto, report_to_proto
from speculation.v1 import record_pb2

_Settings = TypeVar("_Settings", PlannerSettings, TrainingSettings)

# Seconds since 1970, or of a machine's clock.
_TIME_MAX = 1e11

_KIND_TO_PROTO = {
    NoteKind.DROPPED: record_pb2.RECORD_NOTE_KIND_DROPPED,
    NoteKind.REJECTED: record_pb2.RECORD_NOTE_KIND_REJECTED,
    NoteKind.STREAM_OPENED: record_pb2.RECORD_NOTE_KIND_STREAM_OPENED,
    NoteKind.STREAM_CLOSED: record_pb2.RECORD_NOTE_KIND_STREAM_CLOSED,
    NoteKind.ENDED: record_pb2.RECORD_NOTE_KIND_ENDED,
}
_KIND_FROM_PROTO = {number: kind for kind, number in _KIND_TO_PROTO.items()}


def moment_to_proto(moment: Moment) -> record_pb2.Record:
    """The moment as it was."""
    field, write = _WRITERS[type(moment.event)]
    # One of the fields of the oneof, by name: types cannot follow.
    record: Any = record_pb2.Record
    made: record_pb2.Record = record(
        **{"clock_seconds": moment.seconds, field: write(moment.event)}
    )
    return made


def _issued_to_proto(event: Issued) -> record_pb2.RecordDecision:
    plan = None if event.plan is None else plan_to_proto(event.plan)
    return record_pb2.RecordDecision(plan=plan)


def _force_to_proto(event: Forced) -> record_pb2.RecordForce:
    arm = None
    if event.arm is not None:
        arm = record_pb2.RecordArm(drafter=event.arm.drafter, gamma=event.arm.gamma)
    return record_pb2.RecordForce(arm=arm, plan=event.plan)


def _constants(event: Configured | Opening) -> dict[str, str]:
    return {
        "planner_json": json.dumps(asdict(event.planner)),
        "training_json": json.dumps(asdict(event.training)),
    }


def _opening_to_proto(opening: Opening) -> record_pb2.RecordOpening:
    return message_of(
        record_pb2.RecordOpening,
        opening,
        engine=engine_to_proto(opening.spec),
        **_constants(opening),
        profile_json="" if opening.profile is None else opening.profile.to_json(),
        overrides=_terms_to_proto(opening.terms),
        state=state_to_proto(opening.state),
    )


def _terms_to_proto(terms: Iterable[Term]) -> record_pb2.RecordOverrides:
    return record_pb2.RecordOverrides(
        overrides=[
            record_pb2.RecordOverride(
                override=override_to_proto(term.override), ends_at=term.ends_at
            )
            for term in terms
        ]
    )


def moment_from_proto(record: record_pb2.Record) -> Moment | None:
    """None for an event of a kind that is not known here.  Raises RecordingError."""
    seconds = record.clock_seconds
    try:
        _check_time(seconds)
        event = _event(record)
    except RecordingError:
        raise
    except SpeculationError as error:
        raise RecordingError(f"a record that cannot be: {error}") from error
    return None if event is None else Moment(seconds, event)


def _check_time(seconds: float) -> None:
    if not 0 <= seconds < _TIME_MAX:
        raise RecordingError(f"{seconds} is no time")


def _event(record: record_pb2.Record) -> Event | None:
    kind = record.WhichOneof("what")
    return None if kind is None else _READERS[kind](getattr(record, kind))


def _force(message: record_pb2.RecordForce) -> Forced:
    arm = Arm(message.arm.drafter, message.arm.gamma) if message.HasField("arm") else None
    return Forced(arm, message.plan)


def _configured(message: record_pb2.RecordSettings) -> Configured:
    return Configured(
        _settings(PlannerSettings, message.planner_json),
        _settings(TrainingSettings, message.training_json),
    )


def _parted(message: record_pb2.RecordParting) -> Parted:
    _check_time(message.lease_seconds)
    return Parted(message.lease_seconds, message.plan)


def _note(message: record_pb2.RecordNote) -> Noted | None:
    kind = _KIND_FROM_PROTO.get(message.kind)
    return None if kind is None else Noted(kind, message.count, message.text)


def _opening(message: record_pb2.RecordOpening) -> Opening:
    _check_time(message.wall_seconds)
    text = message.profile_json
    return value_of(
        Opening,
        message,
        spec=engine_from_proto(message.engine),
        planner=_settings(PlannerSettings, message.planner_json),
        training=_settings(TrainingSettings, message.training_json),
        profile=Profile.from_json(text) if text else None,
        terms=_terms(message.overrides),
        state=state_from_proto(message.state),
        versions=dict(message.versions),
    )


def _settings(kind: type[_Settings], text: str) -> _Settings:
    try:
        return kind(**json.loads(text))
    except MALFORMED as error:
        raise RecordingError(f"{kind.__name__} that cannot be: {error}") from error


def _terms(message: record_pb2.RecordOverrides) -> tuple[Term, ...]:
    return tuple(
        Term(
            override_from_proto(item.override),
            item.ends_at if item.HasField("ends_at") else None,
        )
        for item in message.overrides
    )


# By event, the field that it travels in.
_WRITERS: Final[Mapping[type, tuple[str, Callable[[Any], Message]]]] = {
    Opening: ("opening", _opening_to_proto),
    Reported: ("report", lambda event: report_to_proto(event.report)),
    Decided: ("decision", lambda event: record_pb2.RecordDecision(plan=event.plan)),
    Issued: ("decision", _issued_to_proto),
    Forced: ("force", _force_to_proto),
    Configured: ("settings", lambda event: record_pb2.RecordSettings(**_constants(event))),
    Parted: (
        "parting",
        lambda event: record_pb2.RecordParting(lease_seconds=event.lease_seconds, plan=event.plan),
    ),
    Overridden: ("overrides", lambda event: _terms_to_proto(event.terms)),
    Lost: ("loss", lambda event: record_pb2.RecordLoss(lost=map(lost_to_proto, event.losses))),
    Profiled: (
        "profile",
        lambda event: record_pb2.RecordProfile(profile_json=event.profile.to_json()),
    ),
    Warmed: (
        "warm_start",
        lambda event: record_pb2.RecordWarmStart(
            beliefs_json=warm_start.to_json(event.beliefs), where=event.where
        ),
    ),
    Trained: (
        "training",
        lambda event: message_of(
            record_pb2.RecordTraining, event, state_json=selective_training.to_json(event.state)
        ),
    ),
    Noted: (
        "note",
        lambda event: message_of(record_pb2.RecordNote, event, kind=_KIND_TO_PROTO[event.kind]),
    ),
}
_READERS: Final[Mapping[str, Callable[[Any], Event | None]]] = {
    "opening": _opening,
    "report": lambda message: Reported(report_from_proto(message)),
    "decision": lambda message: Decided(message.plan if message.HasField("plan") else None),
    "force": _force,
    "settings": _configured,
    "parting": _parted,
    "overrides": lambda message: Overridden(_terms(message)),
    "loss": lambda message: Lost(all_lost_from_proto(message.lost)),
    "profile": lambda message: Profiled(Profile.from_json(message.profile_json)),
    "warm_start": lambda message: Warmed(
        tuple(warm_start.from_json(message.beliefs_json)), message.where
    ),
    "training": lambda message: value_of(
        Trained, message, state=selective_training.from_json(message.state_json)
    ),
    "note": _note,
}
