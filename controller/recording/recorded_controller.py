"""The decision core with everything written down that it is given, and the plans that come out.

    core -> put(event) -> queue -> recorder

The clock is read once for each thing that happens, so that an event has one time.  What others
change behind the core's back (the training beside the engine) is noticed before the next thing
happens.  A call that changes nothing (a plan that is not due yet, or a look) leaves no trace.
The first plan is part of the first opening.

Where the queue is full the event is dropped and counted, and everything after it until the core's
state could be put in again: what lies in between is a marked gap.
"""

import json
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from google.protobuf.message import Message

import controller
from controller.core.acceptance import warm_start
from controller.core.acceptance.warm_start import Belief
from controller.core.clock import Clock
from controller.core.cost.profile import Profile
from controller.core.engine.checkpoint import capture
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, EngineSpec, LostCapability
from controller.core.errors import InvalidReportError
from controller.core.plan import Plan
from controller.core.planning.overrides import Override
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training import selective_training
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.recording.checkpoint_messages import state_to_proto
from controller.wire.engines import engine_to_proto, lost_to_proto
from controller.wire.overrides import override_to_proto
from controller.wire.plans import plan_to_proto
from controller.wire.reports import report_to_proto
from speculation.v1 import engine_pb2, record_pb2

# Events of all sessions between two rounds of the recorder's thread: seconds of a busy fleet.
QUEUE_MAX: Final = 20_000
# Makes the record of what happened, of values that do not change: on the recorder's thread.
Event: TypeAlias = Callable[[], record_pb2.Record]
Queue = deque[tuple["EventLog", Event]]
# Of an override by id: Unix seconds, None without an end or if unknown.
EndOf = Callable[[str], float | None]
# An override whose end moves by less was not renewed.
_SAME_END_SECONDS = 1.0
# Overrides with their ends: Unix seconds, None without an end or if unknown.
_Terms: TypeAlias = tuple[tuple[Override, float | None], ...]


@dataclass(slots=True, eq=False)
class EventLog:
    """Carries the events of one session.

    session: its number.  due: an opening is asked for, nothing is lost yet.

    broken: nothing is taken before an opening.  lost: events that were dropped since the last one.
    over: nothing more is taken.  parts: openings so far; taken: events since the last one, and
    fitting: how many a segment holds.
    """

    engine_id: str
    session: int
    queue: Queue
    end_of: EndOf
    wall: Callable[[], float]
    due: bool = True
    broken: bool = True
    lost: int = 0
    over: bool = False
    parts: int = 0
    taken: int = 0
    fitting: int = QUEUE_MAX

    @property
    def can_open(self) -> bool:
        """Whether an opening is due, and the queue takes it."""
        due = (self.due or self.broken) and not self.over
        return due and len(self.queue) < QUEUE_MAX

    def put(self, event: Event) -> None:
        """Hands an event over, or counts it as lost."""
        if self.over:
            return
        if self.broken or len(self.queue) >= QUEUE_MAX:
            self.break_off()
            return
        self.queue.append((self, event))
        self.taken += 1
        if self.taken >= self.fitting:
            self.due = True

    def break_off(self) -> None:
        """Loses an event: what follows cannot be decided again before the next opening."""
        self.broken = True
        self.lost += 1

    def open(self, opening: Event) -> None:
        """Hands over an opening, where one can be."""
        self.parts += 1
        self.taken = 0
        self.lost, self.due, self.broken = 0, False, False
        self.queue.append((self, opening))


def versions() -> dict[str, str]:
    """Returns the versions on which the last bits of a decision depend."""
    return {
        "controller": controller.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{sys.platform} {platform.machine()}",
    }


class _HeldClock:
    """A clock that is read when told to, and stands still in between."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = clock.now()

    def now(self) -> float:
        """Seconds, as they were at the last `read`."""
        return self._now

    def read(self) -> float:
        """Reads the clock and returns its seconds."""
        self._now = self._clock.now()
        return self._now


class RecordedController(EngineController):
    """Extends EngineController by a record of every input and plan.

    Its own variables are slots: the core's are all in its `__dict__`.
    """

    __slots__ = (
        "_event_log",
        "_profile",
        "_terms",
        "_time",
        "_told_training",
        "_training_settings",
    )

    def __init__(
        self,
        spec: EngineSpec,
        settings: PlannerSettings,
        profile: Profile | None,
        clock: Clock,
        training: TrainingSettings,
        event_log: EventLog,
        *,
        overrides: Iterable[Override] = (),
        trained: TrainingState | None = None,
    ) -> None:
        self._time = _HeldClock(clock)
        super().__init__(
            spec, settings, profile, self._time, training, overrides=overrides, trained=trained
        )
        self._event_log = event_log
        self._profile = profile
        self._training_settings = training
        self._terms = self._terms_now()
        self._told_training = self._training_now()
        self._begin()

    def observe(self, report: StepReport, message: engine_pb2.StepReport | None = None) -> None:
        """Records the report after the core has folded it.  message: what it was read from."""
        self._begin()
        try:
            super().observe(report)
        except InvalidReportError:
            raise
        except BaseException:
            # Half of it may be folded: nobody could do that again.
            self._event_log.break_off()
            raise
        if message is None:
            message = report_to_proto(report)
        # A recording has no room for what an engine may add without end.
        message.DiscardUnknownFields()
        # Bytes are kept, since a part of a message would keep the whole message that it came in.
        seconds, packed = self._time.now(), message.SerializeToString()
        self._put(lambda: _reported(seconds, packed, report))

    def set_overrides(self, overrides: Iterable[Override]) -> bool:
        """Records the overrides if they changed, or if one of them ends later."""
        self._begin()
        changed = super().set_overrides(overrides)
        terms = self._terms_now()
        if changed or not _same_ends(terms, self._terms):
            self._terms = terms
            self._record("overrides", lambda: _terms_to_proto(terms))
        return changed

    def lose(self, losses: Iterable[LostCapability]) -> tuple[LostCapability, ...]:
        """Records the losses that take something more away."""
        self._begin()
        news = super().lose(losses)
        if news:
            self._record("loss", lambda: record_pb2.RecordLoss(lost=map(lost_to_proto, news)))
        return news

    def next_plan(self) -> Plan | None:
        """Records the plan, or that the old one was confirmed."""
        self._begin()
        before = self._evaluated_at
        plan = super().next_plan()
        if plan is not None or self._evaluated_at != before:
            self._record(
                "decision",
                lambda: record_pb2.RecordDecision(
                    plan=None if plan is None else plan_to_proto(plan)
                ),
            )
        return plan

    def force(self, arm: Arm | None) -> Plan:
        """Records the forced arm and its plan."""
        self._begin()
        plan = super().force(arm)
        self._record("force", lambda: _force_to_proto(arm, plan))
        return plan

    def last_plan(self, lease_seconds: float) -> Plan:
        """Records the last plan."""
        self._begin()
        plan = super().last_plan(lease_seconds)
        self._record(
            "parting",
            lambda: record_pb2.RecordParting(lease_seconds=lease_seconds, plan=plan_to_proto(plan)),
        )
        return plan

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Records the new constants."""
        self._begin()
        super().use_settings(settings, training)
        self._training_settings = training
        self._record(
            "settings", lambda: record_pb2.RecordSettings(**_constants(settings, training))
        )

    def use_profile(self, profile: Profile) -> None:
        """Records the new profile."""
        self._begin()
        super().use_profile(profile)
        self._profile = profile
        self._record("profile", lambda: record_pb2.RecordProfile(profile_json=profile.to_json()))

    def begin_from(self, beliefs: Iterable[Belief], where: str) -> None:
        """Records the estimates that were taken over."""
        self._begin()
        known = tuple(beliefs)
        super().begin_from(known, where)
        self._record(
            "warm_start",
            lambda: record_pb2.RecordWarmStart(beliefs_json=warm_start.to_json(known), where=where),
        )

    def note(
        self, kind: "record_pb2.RecordNoteKind.ValueType", count: int = 0, text: str = ""
    ) -> None:
        """Something that the core is not told, for people.  count: of reports that were lost."""
        self._begin()
        self._record("note", lambda: record_pb2.RecordNote(kind=kind, count=count, text=text))
        if kind == record_pb2.RECORD_NOTE_KIND_ENDED:
            self._event_log.over = True

    def _record(self, kind: str, make: Callable[[], Message]) -> None:
        """Records what `make` will make.  kind: the record's field."""
        self._put(_event(self._time.now(), kind, make))

    def _put(self, event: Event) -> None:
        self._event_log.put(event)
        self._told_training = self._training_now()

    def _begin(self) -> None:
        """Prepares for the next event: the time, what others have changed, a due opening."""
        now, event_log = self._time.read(), self._event_log
        training = self._training_now()
        if training is not None and training != self._told_training and not event_log.broken:
            self._record("training", lambda: _training_to_proto(*training))
        if event_log.can_open:
            event_log.open(_event(now, "opening", self._opening()))
            self._told_training = training

    def _terms_now(self) -> _Terms:
        return tuple((o, self._event_log.end_of(o.override_id)) for o in self.overrides)

    def _training_now(self) -> tuple[TrainingState, bool, int] | None:
        training = self.updates.training
        if training is None:
            return None
        return training.state, training.attended, training.stored

    def _opening(self) -> Callable[[], record_pb2.RecordOpening]:
        """Returns what makes the opening of all that the core is made of now."""
        event_log, spec, profile, terms = self._event_log, self.spec, self._profile, self._terms
        settings, state = (self._settings, self._training_settings), capture(self)
        plain = record_pb2.RecordOpening(
            wall_seconds=event_log.wall(),
            session=event_log.session,
            part=event_log.parts + 1,
            lost=event_log.lost,
            versions=versions(),
            cost_source="profile" if self.profile_id else self.cost.prior,
        )

        def make() -> record_pb2.RecordOpening:
            opening = record_pb2.RecordOpening(
                engine=engine_to_proto(spec),
                **_constants(*settings),
                profile_json="" if profile is None else profile.to_json(),
                overrides=_terms_to_proto(terms),
                state=state_to_proto(state),
            )
            opening.MergeFrom(plain)
            return opening

        return make


def _event(seconds: float, kind: str, make: Callable[[], Message]) -> Event:
    # One of the fields of the oneof, by name: types cannot follow.
    record: Any = record_pb2.Record
    return lambda: record(clock_seconds=seconds, **{kind: make()})


def _reported(seconds: float, packed: bytes, report: StepReport) -> record_pb2.Record:
    """The report as it came, but for the plan and the probe that the core took it to follow."""
    record = record_pb2.Record(clock_seconds=seconds)
    record.report.MergeFromString(packed)
    record.report.plan_epoch, record.report.probe_id = report.plan_epoch, report.probe_id
    return record


def _force_to_proto(arm: Arm | None, plan: Plan) -> record_pb2.RecordForce:
    forced = None if arm is None else record_pb2.RecordArm(drafter=arm.drafter, gamma=arm.gamma)
    return record_pb2.RecordForce(arm=forced, plan=plan_to_proto(plan))


def _terms_to_proto(terms: _Terms) -> record_pb2.RecordOverrides:
    return record_pb2.RecordOverrides(
        overrides=[
            record_pb2.RecordOverride(override=override_to_proto(override), ends_at=ends_at)
            for override, ends_at in terms
        ]
    )


def _training_to_proto(
    state: TrainingState, attended: bool, stored: int
) -> record_pb2.RecordTraining:
    return record_pb2.RecordTraining(
        state_json=selective_training.to_json(state), attended=attended, stored=stored
    )


def _constants(planner: PlannerSettings, training: TrainingSettings) -> dict[str, Any]:
    return {
        "planner_json": json.dumps(asdict(planner)),
        "training_json": json.dumps(asdict(training)),
    }


def _same_ends(some: _Terms, others: _Terms) -> bool:
    if len(some) != len(others):
        return False
    return all(
        a == b or (a is not None and b is not None and abs(a - b) < _SAME_END_SECONDS)
        for (_, a), (_, b) in zip(some, others, strict=True)
    )
