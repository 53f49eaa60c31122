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
from controller.core.engine.checkpoint import Tree
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.errors import MALFORMED, SpeculationError
from controller.core.plan import Plan
from controller.core.planning.overrides import Override
from controller.core.settings import PlannerSettings
from controller.core.training import selective_training
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.recording.checkpoint_messages import state_from_proto
from controller.recording.segments import RecordingError, TornError, blocks, found_in
from controller.wire.engines import all_lost_from_proto, engine_from_proto
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
    state: Mapping[str, Tree]


@dataclass(frozen=True, slots=True)
class Moment:
    """A record, with the arguments for the core.

    kind: name of the record's field.  told: arguments of the core's method for this kind; for an
    opening, the `Opening`.
    """

    record: record_pb2.Record
    kind: str
    told: tuple[Any, ...]

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

    def tell(self, core: EngineController) -> Plan | None:
        """Applies the event to a core, and returns the new plan, if any.

        Raises SpeculationError if the core refuses it.
        """
        found = _KINDS[self.kind].tell(core, *self.told)
        return found if isinstance(found, Plan) else None


def moment_of(record: record_pb2.Record) -> Moment | None:
    """Converts a record; returns None for an unknown kind.  Raises RecordingError."""
    kind = record.WhichOneof("what")
    try:
        _check_time(record.clock_seconds)
        if kind is None or (kind == "note" and record.note.kind not in _NOTE_KINDS):
            return None
        return Moment(record, kind, _KINDS[kind].read(getattr(record, kind)))
    except RecordingError:
        raise
    except SpeculationError as error:
        raise RecordingError(f"an invalid record: {error}") from error


def _check_time(seconds: float) -> float:
    if not 0 <= seconds < _TIME_MAX:
        raise RecordingError(f"{seconds} is not a valid time")
    return seconds


def _opening(message: record_pb2.RecordOpening) -> Opening:
    _check_time(message.wall_seconds)
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
        _constants(PlannerSettings, message.planner_json),
        _constants(TrainingSettings, message.training_json),
    )


def _constants(kind: type[_Settings], text: str) -> _Settings:
    try:
        return kind(**json.loads(text))
    except MALFORMED as error:
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


def _train(core: EngineController, state: TrainingState, attended: bool, stored: int) -> None:
    training = core.updates.training
    if training is not None:
        training.state, training.attended, training.stored = state, attended, stored


def _nothing(*_: object) -> tuple[()]:
    return ()


class _Kind(NamedTuple):
    """The core's method for a kind of record, and the function that reads its arguments."""

    tell: Callable[..., object]
    read: Callable[[Any], tuple[Any, ...]]


_KINDS: Final = {
    "opening": _Kind(_nothing, lambda message: (_opening(message),)),
    "report": _Kind(EngineController.observe, lambda message: (report_from_proto(message),)),
    "decision": _Kind(EngineController.next_plan, _nothing),
    "force": _Kind(EngineController.force, _force),
    "settings": _Kind(EngineController.use_settings, _settings),
    "parting": _Kind(
        EngineController.last_plan, lambda message: (_check_time(message.lease_seconds),)
    ),
    "overrides": _Kind(EngineController.set_overrides, lambda message: (_overrides(message),)),
    "loss": _Kind(EngineController.lose, lambda message: (all_lost_from_proto(message.lost),)),
    "profile": _Kind(
        EngineController.use_profile, lambda message: (Profile.from_json(message.profile_json),)
    ),
    "warm_start": _Kind(EngineController.begin_from, _warm_start),
    "training": _Kind(_train, _training),
    "note": _Kind(_nothing, _nothing),
}


class RecordingPart:
    """Reads one segment.  Raises RecordingError if its opening cannot be read.

    damage: why its end cannot be read; set after the last event, "" for a complete segment.  torn:
    it is truncated, as after a kill; the part before is valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self.torn = False
        if path.exists() and not path.is_file():
            raise RecordingError(f"{path} is not a regular file")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
        self._moments = self._walk(data)
        first = next(self._moments, None)
        if first is None or first.kind != "opening":
            why = self.damage or "it does not begin with an opening"
            raise RecordingError(f"{path} cannot be read: {why}")
        self.began_at = first.seconds
        self.opening: Opening = first.told[0]

    def moments(self) -> Iterator[Moment]:
        """Yields the events after the opening.  May be called once."""
        for moment in self._moments:
            if moment.kind == "opening":
                self.damage = "a second opening"
                return
            yield moment

    def _walk(self, data: bytes) -> Iterator[Moment]:
        try:
            for at, block in blocks(data):
                for record in block.records:
                    moment = moment_of(record)
                    if moment is None:
                        self.damage = f"at byte {at}: a record of an unknown kind"
                        return
                    yield moment
        except TornError as error:
            self.damage, self.torn = str(error), True
        except RecordingError as error:
            self.damage = str(error)


@dataclass(frozen=True, slots=True)
class Recording:
    """The segments of one engine, the oldest first."""

    engine_id: str
    paths: tuple[Path, ...]


def find(path: Path, engine_id: str = "") -> Recording:
    """Returns the recording in a segment's file, or an engine's recording in a directory.

    engine_id: the engine, if the directory has several.  Raises RecordingError.
    """
    if not path.is_dir():
        found = RecordingPart(path).opening.spec.engine_id
        if engine_id not in {"", found}:
            raise RecordingError(f"{path} is a recording of engine {found}, not of {engine_id}")
        return Recording(found, (path,))
    try:
        segments = found_in(path)
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
    wanted = engine_id or engines[0]
    return Recording(wanted, tuple(s.path for s in segments if s.engine_id == wanted))
