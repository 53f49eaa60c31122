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
from controller.core.engine.checkpoint import Tree, Typed, capture, restore
from controller.core.engine.engine_controller import EngineController
from controller.core.errors import SpeculationError
from controller.core.settings import PlannerSettings
from controller.recording.checkpoint_messages import state_to_proto
from controller.recording.recorded_controller import versions
from controller.recording.recording import Moment, Opening, Recording, RecordingPart
from controller.recording.segments import RecordingError
from controller.wire.override_text import reason_text
from controller.wire.plans import plan_to_proto
from speculation.v1 import plan_pb2

# Number of differing plan rows that are shown.
_ROWS_SHOWN = 4
# Errors that a core can raise if its recorded state is not valid.
_NONSENSE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


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


class Visitor(Protocol):
    """Observes a replay."""

    def opened(self, opening: Opening, seconds: float, wall_seconds: float, restarts: bool) -> None:
        """Called when a segment begins.  restarts: it does not continue the one before."""

    def before(self, moment: Moment, wall_seconds: float, core: EngineController) -> None:
        """Called before an event is applied to the core, which must not be changed."""


def rebuilt(
    opening: Opening, clock: ReplayClock, planner: PlannerSettings | None = None
) -> EngineController:
    """Restores a core.  planner: replaces the recorded settings.  Raises RecordingError."""
    try:
        core = EngineController(
            opening.spec, opening.planner, opening.profile, clock, opening.training,
            overrides=opening.overrides,
        )  # fmt: skip
        restore(core, opening.state)
        if planner is not None:
            core.use_settings(planner, opening.training)
    except SpeculationError as error:
        raise RecordingError(f"an invalid opening: {error}") from error
    except _NONSENSE as error:
        raise RecordingError(f"an invalid opening: {error!r}") from error
    return core


def guarded(core: EngineController, moment: Moment, where: str) -> plan_pb2.Plan | None:
    """Applies an event to a core.  Raises RecordingError, even for values that crash the core."""
    with _nonsense_refused(where):
        plan = moment.tell(core)
        return None if plan is None else plan_to_proto(plan)


@contextmanager
def _nonsense_refused(where: str) -> Iterator[None]:
    try:
        yield
    except RecordingError:
        raise
    except (SpeculationError, *_NONSENSE) as error:
        raise RecordingError(f"{where} cannot be replayed: {error!r}") from error


def replay(recording: Recording, visitors: Iterable[Visitor] = ()) -> ReplayVerdict:
    """Replays a recording.  Raises RecordingError if none of it can be read."""
    # Invalid numbers show up as a difference or an error, so numpy's warnings are not needed.
    with np.errstate(all="ignore"):
        return _Replay(recording, tuple(visitors)).run()


class _Replay:
    """Replays one recording once."""

    def __init__(self, recording: Recording, visitors: tuple[Visitor, ...]) -> None:
        self._paths = recording.paths
        self._visitors = visitors
        self._verdict = ReplayVerdict(recording.engine_id)
        self._clock = ReplayClock()
        self._core: EngineController | None = None
        self._session = self._part = 0
        # Unix time minus the core's clock at a session's first segment, so that it is continuous.
        self._offset = 0.0

    def run(self) -> ReplayVerdict:
        """Replays all segments."""
        verdict = self._verdict
        for part in self._parts():
            goes_on = self._goes_on(part)
            try:
                core = self._core if goes_on and self._core else rebuilt(part.opening, self._clock)
            except RecordingError as error:
                self._gap(part.path, str(error))
                continue
            self._core = core
            self._session, self._part = part.opening.message.session, part.opening.message.part
            verdict.segments += 1
            for visitor in self._visitors:
                visitor.opened(part.opening, part.began_at, self._wall(part.began_at), not goes_on)
            try:
                self._decide(part, core)
            except RecordingError as error:
                part.damage = part.damage or str(error)
            if part.damage:
                self._gap(part.path, part.damage)
        if not verdict.segments:
            raise RecordingError("; ".join(f"{name}: {why}" for name, why in verdict.gaps))
        return verdict

    def _wall(self, seconds: float) -> float:
        return seconds + self._offset

    def _parts(self) -> Iterator[RecordingPart]:
        for path in self._paths:
            try:
                yield RecordingPart(path)
            except RecordingError as error:
                self._gap(path, str(error))

    def _gap(self, path: Path, why: str) -> None:
        """Records a gap, after which the core must be restored from an opening."""
        self._verdict.gaps.append((path.name, why))
        self._core = None

    def _goes_on(self, part: RecordingPart) -> bool:
        """Returns whether the core's state is that of the opening; records all other cases."""
        verdict, opening = self._verdict, part.opening.message
        if opening.session != self._session:
            self._offset = opening.wall_seconds - part.began_at
        wall = self._wall(part.began_at)
        self._clock.set(part.began_at)
        if not verdict.began_at:
            verdict.began_at = wall
            verdict.strange = _strange(opening.versions)
        verdict.ended_at = max(verdict.ended_at, wall)
        verdict.sessions += opening.session != self._session
        if opening.lost:
            verdict.lost += opening.lost
            self._gap(part.path, f"{opening.lost} records before it were lost")
        if self._core is None or opening.session != self._session:
            return False
        if opening.part != self._part + 1:
            self._gap(part.path, "the segment before it is missing")
            return False
        verdict.states += 1
        text = state_difference(part.opening.state, capture(self._core))
        if text:
            self._differ(part, 0, wall, text)
        return not text

    def _decide(self, part: RecordingPart, core: EngineController) -> None:
        verdict = self._verdict
        for number, moment in enumerate(part.moments(), 1):
            wall = self._wall(moment.seconds)
            self._clock.set(moment.seconds)
            verdict.ended_at = max(verdict.ended_at, wall)
            with _nonsense_refused(f"record {number}"):
                for visitor in self._visitors:
                    visitor.before(moment, wall, core)
            now = guarded(core, moment, f"record {number}")
            verdict.reports += moment.kind == "report"
            if moment.is_decision:
                verdict.decisions += 1
                verdict.plans += moment.plan is not None
                text = plan_difference(moment.plan, now)
                if text:
                    self._differ(part, number, wall, text)

    def _differ(self, part: RecordingPart, record: int, wall: float, text: str) -> None:
        self._verdict.differences += 1
        if self._verdict.first is None:
            self._verdict.first = DecisionDifference(part.path, record, wall, text)


def _strange(there: Mapping[str, str]) -> list[tuple[str, str, str]]:
    here = versions()
    found = ((name, was, here.get(name, "")) for name, was in sorted(there.items()))
    return [item for item in found if item[1] != item[2]]


def plan_difference(recorded: plan_pb2.Plan | None, now: plan_pb2.Plan | None) -> str:
    """Describes the difference of two plans; "" if they are equal bit by bit."""
    if recorded is None or now is None:
        if recorded is now:
            return ""
        return f"recorded {_said(recorded)}, now {_said(now)}"
    if recorded.SerializeToString(deterministic=True) == now.SerializeToString(deterministic=True):
        return ""
    parts = [
        f"{name}: recorded {str(was)!r}, now {str(is_)!r}"
        for name in ("epoch", "lease_ms", "reason_detail", "draft_version")
        if (was := getattr(recorded, name)) != (is_ := getattr(now, name))
    ]
    if recorded.reason != now.reason:
        parts.append(f"reason: recorded {reason_text(recorded)}, now {reason_text(now)}")
    if recorded.regime != now.regime:
        parts.append(f"regime: recorded {_line(recorded.regime)}, now {_line(now.regime)}")
    if list(recorded.overrides) != list(now.overrides):
        parts.append(f"overrides: recorded {list(recorded.overrides)}, now {list(now.overrides)}")
    rows = _rows(recorded, now)
    return "; ".join([*parts, *rows[:_ROWS_SHOWN], *(["…"] if len(rows) > _ROWS_SHOWN else [])])


def _rows(recorded: plan_pb2.Plan, now: plan_pb2.Plan) -> list[str]:
    if len(recorded.rows) != len(now.rows):
        return [f"rows: recorded {len(recorded.rows)}, now {len(now.rows)}"]
    return [
        f"B <= {was.max_batch_size}: recorded {_line(was)}, now {_line(is_)}"
        for was, is_ in zip(recorded.rows, now.rows, strict=True)
        if was != is_
    ]


def _said(plan: plan_pb2.Plan | None) -> str:
    return "no new plan" if plan is None else f"plan {plan.epoch}"


def _line(message: object) -> str:
    return " ".join(str(message).split())


def state_difference(recorded: Mapping[str, Tree], now: Mapping[str, Tree]) -> str:
    """Describes the first difference of two states; "" if they are equal bit by bit."""
    was, is_ = state_to_proto(recorded), state_to_proto(now)
    if was.SerializeToString(deterministic=True) == is_.SerializeToString(deterministic=True):
        return ""
    return f"the core's variables differ: {_where(recorded, now, 'core')}"


def _where(recorded: Tree, now: Tree, name: str) -> str:
    """Describes the first variable that differs, with its path."""
    if type(recorded) is type(now):
        mine, theirs = _children(recorded), _children(now)
        if mine and theirs and mine.keys() == theirs.keys():
            for key, value in mine.items():
                if state_to_proto({"": value}) != state_to_proto({"": theirs[key]}):
                    return _where(value, theirs[key], f"{name}.{key}")
    return f"{name}: recorded {_line(recorded)[:120]}, now {_line(now)[:120]}"


def _children(tree: Tree) -> Mapping[Any, Tree]:
    if isinstance(tree, Typed):
        return dict(tree.fields)
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return {}
