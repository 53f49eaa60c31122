"""Repeats the decisions of a recording: a core gets the recorded inputs.

It must make the same plans, bit by bit.  At every segment's opening its state must be the recorded
one, too.  After a gap (lost records, or a damaged end) it continues from the next opening.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from controller.core.clock import VirtualClock
from controller.core.engine.checkpoint import (
    RecordedObject,
    StateTree,
    capture_state,
    restore_state,
)
from controller.core.engine.engine_controller import EngineController
from controller.core.errors import SpeculationError
from controller.core.settings import PlannerSettings
from controller.recording.checkpoint_messages import state_to_proto
from controller.recording.recorded_controller import versions
from controller.recording.recording import Opening, RecordedEvent, Recording, SegmentReader
from controller.recording.segments import RecordingError
from controller.wire.override_text import reason_text
from controller.wire.plans import plan_to_proto
from speculation.v1 import plan_pb2

# Number of differing plan rows that are shown.
_ROWS_SHOWN = 4
# Errors that a core can raise if its recorded state is not valid.
_CORE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class ReplayClock(VirtualClock):
    """A clock that shows the recorded times."""

    def set(self, seconds: float) -> None:
        """Sets the time, in seconds."""
        self._now = seconds


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """A difference between the replay and the recording.

    record: number in its segment, 0 = the opening.  wall_seconds: Unix time.
    """

    path: Path
    record: int
    wall_seconds: float
    text: str


@dataclass(slots=True)
class ReplayVerdict:
    """The result of a replay.

    gaps: (segment, reason) of those after which it restarted.  lost: number of records that the
    sidecar dropped.  first: the first difference.  strange: versions that differ, as (name,
    recorded, replayed).
    """

    engine_id: str
    segments: int = 0
    sessions: int = 0
    reports: int = 0
    decisions: int = 0
    plans: int = 0
    states: int = 0
    lost: int = 0
    differences: int = 0
    first: DecisionDifference | None = None
    began_at: float = 0.0
    ended_at: float = 0.0
    gaps: list[tuple[str, str]] = field(default_factory=list)
    strange: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether every plan and every state is as recorded."""
        return self.differences == 0


class ReplayVisitor(Protocol):
    """Observes a replay."""

    def on_segment(
        self, opening: Opening, seconds: float, wall_seconds: float, restarts: bool
    ) -> None:
        """Called when a segment begins.  restarts: it does not continue the one before."""

    def before_event(
        self, moment: RecordedEvent, wall_seconds: float, core: EngineController
    ) -> None:
        """Called before an event is applied to the core, which must not be changed."""


def rebuild_core(
    opening: Opening, clock: ReplayClock, planner: PlannerSettings | None = None
) -> EngineController:
    """Restores a core.  planner: replaces the recorded settings.  Raises RecordingError."""
    try:
        core = EngineController(
            opening.spec, opening.planner, opening.profile, clock, opening.training,
            overrides=opening.overrides,
        )  # fmt: skip
        restore_state(core, opening.state)
        if planner is not None:
            core.use_settings(planner, opening.training)
    except SpeculationError as error:
        raise RecordingError(f"an invalid opening: {error}") from error
    except _CORE_ERRORS as error:
        raise RecordingError(f"an invalid opening: {error!r}") from error
    return core


def apply_checked(
    core: EngineController, moment: RecordedEvent, context: str
) -> plan_pb2.Plan | None:
    """Applies an event to a core.  Raises RecordingError, even for values that crash the core."""
    with _translate_errors(context):
        plan = moment.apply_to(core)
        return None if plan is None else plan_to_proto(plan)


@contextmanager
def _translate_errors(context: str) -> Iterator[None]:
    try:
        yield
    except RecordingError:
        raise
    except (SpeculationError, *_CORE_ERRORS) as error:
        raise RecordingError(f"{context} cannot be replayed: {error!r}") from error


def replay(recording: Recording, visitors: Iterable[ReplayVisitor] = ()) -> ReplayVerdict:
    """Replays a recording.  Raises RecordingError if none of it can be read."""
    # Invalid numbers show up as a difference or an error, so numpy's warnings are not needed.
    with np.errstate(all="ignore"):
        return _Replay(recording, tuple(visitors)).run()


class _Replay:
    """Replays one recording once."""

    def __init__(self, recording: Recording, visitors: tuple[ReplayVisitor, ...]) -> None:
        self._paths = recording.paths
        self._visitors = visitors
        self._verdict = ReplayVerdict(recording.engine_id)
        self._clock = ReplayClock()
        self._core: EngineController | None = None
        self._session = self._part_number = 0
        # Unix time minus the core's clock at a session's first segment, so that it is continuous.
        self._offset = 0.0

    def run(self) -> ReplayVerdict:
        """Replays all segments."""
        verdict = self._verdict
        for part in self._parts():
            is_continuation = self._is_continuation(part)
            try:
                core = (
                    self._core
                    if is_continuation and self._core
                    else rebuild_core(part.opening, self._clock)
                )
            except RecordingError as error:
                self._record_gap(part.path, str(error))
                continue
            self._core = core
            self._session, self._part_number = (
                part.opening.message.session,
                part.opening.message.part,
            )
            verdict.segments += 1
            for visitor in self._visitors:
                visitor.on_segment(
                    part.opening,
                    part.began_at,
                    self._wall_seconds(part.began_at),
                    not is_continuation,
                )
            try:
                self._replay_events(part, core)
            except RecordingError as error:
                part.damage = part.damage or str(error)
            if part.damage:
                self._record_gap(part.path, part.damage)
        if not verdict.segments:
            raise RecordingError("; ".join(f"{name}: {reason}" for name, reason in verdict.gaps))
        return verdict

    def _wall_seconds(self, seconds: float) -> float:
        return seconds + self._offset

    def _parts(self) -> Iterator[SegmentReader]:
        for path in self._paths:
            try:
                yield SegmentReader(path)
            except RecordingError as error:
                self._record_gap(path, str(error))

    def _record_gap(self, path: Path, reason: str) -> None:
        """Records a gap, after which the core must be restored from an opening."""
        self._verdict.gaps.append((path.name, reason))
        self._core = None

    def _is_continuation(self, part: SegmentReader) -> bool:
        """Returns whether the core's state is that of the opening; records all other cases."""
        verdict, opening = self._verdict, part.opening.message
        if opening.session != self._session:
            self._offset = opening.wall_seconds - part.began_at
        wall = self._wall_seconds(part.began_at)
        self._clock.set(part.began_at)
        if not verdict.began_at:
            verdict.began_at = wall
            verdict.strange = _version_differences(opening.versions)
        verdict.ended_at = max(verdict.ended_at, wall)
        verdict.sessions += opening.session != self._session
        if opening.lost:
            verdict.lost += opening.lost
            self._record_gap(part.path, f"{opening.lost} records before it were lost")
        if self._core is None or opening.session != self._session:
            return False
        if opening.part != self._part_number + 1:
            self._record_gap(part.path, "the segment before it is missing")
            return False
        verdict.states += 1
        text = state_difference(part.opening.state, capture_state(self._core))
        if text:
            self._record_difference(part, 0, wall, text)
        return not text

    def _replay_events(self, part: SegmentReader, core: EngineController) -> None:
        verdict = self._verdict
        for number, moment in enumerate(part.events(), 1):
            wall = self._wall_seconds(moment.seconds)
            self._clock.set(moment.seconds)
            verdict.ended_at = max(verdict.ended_at, wall)
            with _translate_errors(f"record {number}"):
                for visitor in self._visitors:
                    visitor.before_event(moment, wall, core)
            replayed_plan = apply_checked(core, moment, f"record {number}")
            verdict.reports += moment.kind == "report"
            if moment.is_decision:
                verdict.decisions += 1
                verdict.plans += moment.plan is not None
                text = plan_difference(moment.plan, replayed_plan)
                if text:
                    self._record_difference(part, number, wall, text)

    def _record_difference(self, part: SegmentReader, record: int, wall: float, text: str) -> None:
        self._verdict.differences += 1
        if self._verdict.first is None:
            self._verdict.first = DecisionDifference(part.path, record, wall, text)


def _version_differences(recorded_versions: Mapping[str, str]) -> list[tuple[str, str, str]]:
    replay_versions = versions()
    pairs = (
        (name, recorded_version, replay_versions.get(name, ""))
        for name, recorded_version in sorted(recorded_versions.items())
    )
    return [item for item in pairs if item[1] != item[2]]


def plan_difference(recorded: plan_pb2.Plan | None, replayed: plan_pb2.Plan | None) -> str:
    """Describes the difference of two plans; "" if they are equal bit by bit."""
    if recorded is None or replayed is None:
        if recorded is replayed:
            return ""
        return f"recorded {_plan_text(recorded)}, now {_plan_text(replayed)}"
    if recorded.SerializeToString(deterministic=True) == replayed.SerializeToString(
        deterministic=True
    ):
        return ""
    parts = [
        f"{name}: recorded {str(recorded_value)!r}, now {str(replayed_value)!r}"
        for name in ("epoch", "lease_ms", "reason_detail", "draft_version")
        if (recorded_value := getattr(recorded, name))
        != (replayed_value := getattr(replayed, name))
    ]
    if recorded.reason != replayed.reason:
        parts.append(f"reason: recorded {reason_text(recorded)}, now {reason_text(replayed)}")
    if recorded.regime != replayed.regime:
        parts.append(
            f"regime: recorded {_one_line(recorded.regime)}, now {_one_line(replayed.regime)}"
        )
    if list(recorded.overrides) != list(replayed.overrides):
        parts.append(
            f"overrides: recorded {list(recorded.overrides)}, now {list(replayed.overrides)}"
        )
    rows = _row_differences(recorded, replayed)
    return "; ".join([*parts, *rows[:_ROWS_SHOWN], *(["…"] if len(rows) > _ROWS_SHOWN else [])])


def _row_differences(recorded: plan_pb2.Plan, replayed: plan_pb2.Plan) -> list[str]:
    if len(recorded.rows) != len(replayed.rows):
        return [f"rows: recorded {len(recorded.rows)}, now {len(replayed.rows)}"]
    return [
        f"B <= {recorded_row.max_batch_size}: recorded {_one_line(recorded_row)}, now "
        f"{_one_line(replayed_row)}"
        for recorded_row, replayed_row in zip(recorded.rows, replayed.rows, strict=True)
        if recorded_row != replayed_row
    ]


def _plan_text(plan: plan_pb2.Plan | None) -> str:
    return "no new plan" if plan is None else f"plan {plan.epoch}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def state_difference(recorded: Mapping[str, StateTree], replayed: Mapping[str, StateTree]) -> str:
    """Describes the first difference of two states; "" if they are equal bit by bit."""
    recorded_message, replayed_message = state_to_proto(recorded), state_to_proto(replayed)
    if recorded_message.SerializeToString(deterministic=True) == replayed_message.SerializeToString(
        deterministic=True
    ):
        return ""
    return f"the core's variables differ: {_first_difference(recorded, replayed, 'core')}"


def _first_difference(recorded: StateTree, replayed: StateTree, name: str) -> str:
    """Describes the first variable that differs, with its path."""
    if type(recorded) is type(replayed):
        recorded_children, replayed_children = _children(recorded), _children(replayed)
        if (
            recorded_children
            and replayed_children
            and recorded_children.keys() == replayed_children.keys()
        ):
            for key, value in recorded_children.items():
                if state_to_proto({"": value}) != state_to_proto({"": replayed_children[key]}):
                    return _first_difference(value, replayed_children[key], f"{name}.{key}")
    return f"{name}: recorded {_one_line(recorded)[:120]}, now {_one_line(replayed)[:120]}"


def _children(tree: StateTree) -> Mapping[Any, StateTree]:
    if isinstance(tree, RecordedObject):
        return dict(tree.fields)
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return {}
