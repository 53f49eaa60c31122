"""Reads a recording from disk: the segments of one engine, in order.

A truncated or damaged part is skipped and reported.  Records remain protobuf messages; each is
returned with the converted arguments for the core's method.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from controller.core.acceptance import warm_start
from controller.core.cost.profile import Profile
from controller.core.engine.checkpoint import StateTree
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.errors import MALFORMED_JSON_ERRORS, SpeculationError
from controller.core.plan import Plan
from controller.core.planning.overrides import Override
from controller.core.settings import PlannerSettings
from controller.core.training import selective_training
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.recording.checkpoint_messages import state_from_proto
from controller.recording.segments import RecordingError, TornError, list_segments, read_blocks
from controller.wire.engines import engine_from_proto, lost_capabilities_from_proto
from controller.wire.overrides import override_from_proto
from controller.wire.reports import report_from_proto
from speculation.v1 import plan_pb2, record_pb2

_Settings = TypeVar("_Settings", PlannerSettings, TrainingSettings)

# Largest time, in Unix seconds or seconds of the core's clock.
_TIME_MAX = 1e11
_NOTE_KINDS = frozenset(record_pb2.RecordNoteKind.values()) - {
    record_pb2.RECORD_NOTE_KIND_UNSPECIFIED
}
# Kinds of records that contain the resulting plan.
_DECIDING = frozenset({"decision", "force", "parting"})


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of a core at the beginning of a segment, converted from `message`."""

    message: record_pb2.RecordOpening
    spec: EngineSpec
    planner: PlannerSettings
    training: TrainingSettings
    profile: Profile | None
    overrides: tuple[Override, ...]
    state: Mapping[str, StateTree]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A record, with the arguments for the core.

    kind: name of the record's field.  arguments: arguments of the core's method for this kind; for
    an opening, the `Opening`.
    """

    record: record_pb2.Record
    kind: str
    arguments: tuple[Any, ...]

    @property
    def seconds(self) -> float:
        """Returns the time of the core's clock."""
        return self.record.clock_seconds

    @property
    def is_decision(self) -> bool:
        """Whether the core was asked for a plan."""
        return self.kind in _DECIDING

    @property
    def plan(self) -> plan_pb2.Plan | None:
        """Returns the resulting plan; None if the old one stayed, or no plan was requested."""
        message = getattr(self.record, self.kind)
        return message.plan if self.is_decision and message.HasField("plan") else None

    def apply_to(self, core: EngineController) -> Plan | None:
        """Applies the event to a core, and returns the new plan, if any.

        Raises SpeculationError if the core refuses it.
        """
        result = _KINDS[self.kind].apply(core, *self.arguments)
        return result if isinstance(result, Plan) else None


def event_from_record(record: record_pb2.Record) -> RecordedEvent | None:
    """Converts a record; returns None for an unknown kind.  Raises RecordingError."""
    kind = record.WhichOneof("what")
    try:
        _require_time(record.clock_seconds)
        if kind is None or (kind == "note" and record.note.kind not in _NOTE_KINDS):
            return None
        return RecordedEvent(record, kind, _KINDS[kind].read(getattr(record, kind)))
    except RecordingError:
        raise
    except SpeculationError as error:
        raise RecordingError(f"an invalid record: {error}") from error


def _require_time(seconds: float) -> float:
    if not 0 <= seconds < _TIME_MAX:
        raise RecordingError(f"{seconds} is not a valid time")
    return seconds


def _opening(message: record_pb2.RecordOpening) -> Opening:
    _require_time(message.wall_seconds)
    text = message.profile_json
    return Opening(
        message,
        engine_from_proto(message.engine),
        *_settings(message),
        Profile.from_json(text) if text else None,
        _overrides(message.overrides),
        state_from_proto(message.state),
    )


def _settings(
    message: record_pb2.RecordOpening | record_pb2.RecordSettings,
) -> tuple[PlannerSettings, TrainingSettings]:
    return (
        _settings_from_json(PlannerSettings, message.planner_json),
        _settings_from_json(TrainingSettings, message.training_json),
    )


def _settings_from_json(kind: type[_Settings], text: str) -> _Settings:
    try:
        return kind(**json.loads(text))
    except MALFORMED_JSON_ERRORS as error:
        raise RecordingError(f"invalid {kind.__name__}: {error}") from error


def _overrides(message: record_pb2.RecordOverrides) -> tuple[Override, ...]:
    return tuple(override_from_proto(item.override) for item in message.overrides)


def _force(message: record_pb2.RecordForce) -> tuple[Arm | None]:
    return (Arm(message.arm.drafter, message.arm.gamma) if message.HasField("arm") else None,)


def _warm_start(message: record_pb2.RecordWarmStart) -> tuple[Any, ...]:
    return tuple(warm_start.from_json(message.beliefs_json)), message.where


def _training(message: record_pb2.RecordTraining) -> tuple[TrainingState, bool, int]:
    state = selective_training.from_json(message.state_json)
    return state, message.attended, message.stored


def _set_training(
    core: EngineController, state: TrainingState, attended: bool, stored: int
) -> None:
    training = core.updates.training
    if training is not None:
        training.state, training.is_trainer_connected, training.stored_signals = (
            state,
            attended,
            stored,
        )


def _no_arguments(*_: object) -> tuple[()]:
    return ()


class _Kind(NamedTuple):
    """The core's method for a kind of record, and the function that reads its arguments."""

    apply: Callable[..., object]
    read: Callable[[Any], tuple[Any, ...]]


_KINDS: Final = {
    "opening": _Kind(_no_arguments, lambda message: (_opening(message),)),
    "report": _Kind(EngineController.observe, lambda message: (report_from_proto(message),)),
    "decision": _Kind(EngineController.next_plan, _no_arguments),
    "force": _Kind(EngineController.force_arm, _force),
    "settings": _Kind(EngineController.use_settings, _settings),
    "parting": _Kind(
        EngineController.make_last_plan, lambda message: (_require_time(message.lease_seconds),)
    ),
    "overrides": _Kind(EngineController.set_overrides, lambda message: (_overrides(message),)),
    "loss": _Kind(
        EngineController.record_lost_capabilities,
        lambda message: (lost_capabilities_from_proto(message.lost),),
    ),
    "profile": _Kind(
        EngineController.use_profile, lambda message: (Profile.from_json(message.profile_json),)
    ),
    "warm_start": _Kind(EngineController.warm_start_from, _warm_start),
    "training": _Kind(_set_training, _training),
    "note": _Kind(_no_arguments, _no_arguments),
}


class SegmentReader:
    """Reads one segment.  Raises RecordingError if its opening cannot be read.

    damage: why its end cannot be read; set after the last event, "" for a complete segment.
    is_torn: it is truncated, as after a kill; the part before is valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self.is_torn = False
        if path.exists() and not path.is_file():
            raise RecordingError(f"{path} is not a regular file")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
        self._events = self._read_events(data)
        first = next(self._events, None)
        if first is None or first.kind != "opening":
            reason = self.damage or "it does not begin with an opening"
            raise RecordingError(f"{path} cannot be read: {reason}")
        self.began_at = first.seconds
        self.opening: Opening = first.arguments[0]

    def events(self) -> Iterator[RecordedEvent]:
        """Yields the events after the opening.  May be called once."""
        for moment in self._events:
            if moment.kind == "opening":
                self.damage = "a second opening"
                return
            yield moment

    def _read_events(self, data: bytes) -> Iterator[RecordedEvent]:
        try:
            for position, block in read_blocks(data):
                for record in block.records:
                    moment = event_from_record(record)
                    if moment is None:
                        self.damage = f"at byte {position}: a record of an unknown kind"
                        return
                    yield moment
        except TornError as error:
            self.damage, self.is_torn = str(error), True
        except RecordingError as error:
            self.damage = str(error)


@dataclass(frozen=True, slots=True)
class Recording:
    """The segments of one engine, the oldest first."""

    engine_id: str
    paths: tuple[Path, ...]


def find_recording(path: Path, engine_id: str = "") -> Recording:
    """Returns the recording in a segment's file, or an engine's recording in a directory.

    engine_id: the engine, if the directory has several.  Raises RecordingError.
    """
    if not path.is_dir():
        segment_engine = SegmentReader(path).opening.spec.engine_id
        if engine_id not in {"", segment_engine}:
            raise RecordingError(
                f"{path} is a recording of engine {segment_engine}, not of {engine_id}"
            )
        return Recording(segment_engine, (path,))
    try:
        segments = list_segments(path)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    engines = sorted({segment.engine_id for segment in segments})
    if not engines:
        raise RecordingError(f"{path} contains no recording")
    if engine_id and engine_id not in engines:
        raise RecordingError(
            f"{path} has no recording of engine {engine_id!r}, only of {', '.join(engines)}"
        )
    if len(engines) > 1 and not engine_id:
        raise RecordingError(
            f"{path} has recordings of several engines: name one of {', '.join(engines)}"
        )
    chosen_engine = engine_id or engines[0]
    return Recording(chosen_engine, tuple(s.path for s in segments if s.engine_id == chosen_engine))
