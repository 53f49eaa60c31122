"""Extends the decision core: records all of its inputs and its plans.

    core -> put(event) -> queue -> recorder

The clock is read once per event, so that an event has one time.  Changes that do not go through the
core's methods (training beside the engine) are detected before the next event.  A call that changes
nothing (for example, if no plan is due) is not recorded.  The first plan is part of the first
opening.

If the queue is full, events are dropped and counted until the core's state can be queued again; the
recording then has a marked gap.
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
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.clock import Clock
from controller.core.cost.profile import Profile
from controller.core.engine.checkpoint import capture_state
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
from controller.wire.engines import engine_to_proto, lost_capability_to_proto
from controller.wire.overrides import override_to_proto
from controller.wire.plans import plan_to_proto
from controller.wire.reports import report_to_proto
from speculation.v1 import engine_pb2, record_pb2

# Most queued events of all sessions: several seconds of a busy fleet.
QUEUE_MAX: Final = 20_000
# Makes a record on the recorder's thread, from values that do not change.
Event: TypeAlias = Callable[[], record_pb2.Record]
Queue = deque[tuple["EventLog", Event]]
# Returns the end of an override by its id: Unix seconds, None without an end or if unknown.
OverrideEndTime = Callable[[str], float | None]
# If the end of an override moves by less, it was not renewed.
_SAME_END_SECONDS = 1.0
# Overrides with their ends: Unix seconds, None without an end or if unknown.
_OverrideTerms: TypeAlias = tuple[tuple[Override, float | None], ...]


@dataclass(slots=True, eq=False)
class EventLog:
    """Queues the events of one session.

    session: its number.  is_opening_due: an opening is requested; no event is lost yet.  has_gap:
    events are dropped until the next opening.  lost_events: events that were dropped since the last
    opening.  is_closed: the session has ended.  openings: number of openings.
    events_since_opening: events since the last opening. events_per_segment: estimated number of
    events per segment.
    """

    engine_id: str
    session: int
    queue: Queue
    override_end_time: OverrideEndTime
    wall: Callable[[], float]
    is_opening_due: bool = True
    has_gap: bool = True
    lost_events: int = 0
    is_closed: bool = False
    openings: int = 0
    events_since_opening: int = 0
    events_per_segment: int = QUEUE_MAX

    @property
    def can_open(self) -> bool:
        """Whether an opening is due and fits into the queue."""
        is_wanted = (self.is_opening_due or self.has_gap) and not self.is_closed
        return is_wanted and len(self.queue) < QUEUE_MAX

    def put(self, event: Event) -> None:
        """Queues an event, or counts it as lost."""
        if self.is_closed:
            return
        if self.has_gap or len(self.queue) >= QUEUE_MAX:
            self.drop_event()
            return
        self.queue.append((self, event))
        self.events_since_opening += 1
        if self.events_since_opening >= self.events_per_segment:
            self.is_opening_due = True

    def drop_event(self) -> None:
        """Drops an event: later events cannot be replayed before the next opening."""
        self.has_gap = True
        self.lost_events += 1

    def open(self, opening: Event) -> None:
        """Queues an opening; `can_open` must be true."""
        self.openings += 1
        self.events_since_opening = 0
        self.lost_events, self.is_opening_due, self.has_gap = 0, False, False
        self.queue.append((self, opening))


def versions() -> dict[str, str]:
    """Returns the versions that affect the last bits of a decision."""
    return {
        "controller": controller.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{sys.platform} {platform.machine()}",
    }


class _FrozenClock:
    """A clock that advances only when `read` is called."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = clock.now()

    def now(self) -> float:
        """Returns the seconds of the last `read`."""
        return self._now

    def read(self) -> float:
        """Reads the clock and returns its seconds."""
        self._now = self._clock.now()
        return self._now


class RecordedController(EngineController):
    """An EngineController that records every input and plan.

    Its own variables are slots, because a checkpoint contains the `__dict__`.
    """

    __slots__ = (
        "_event_log",
        "_last_recorded_training",
        "_profile",
        "_terms",
        "_time",
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
        training_state: TrainingState | None = None,
    ) -> None:
        self._time = _FrozenClock(clock)
        super().__init__(
            spec,
            settings,
            profile,
            self._time,
            training,
            overrides=overrides,
            training_state=training_state,
        )
        self._event_log = event_log
        self._profile = profile
        self._training_settings = training
        self._terms = self._terms_now()
        self._last_recorded_training = self._training_now()
        self._begin_event()

    def observe(self, report: StepReport, message: engine_pb2.StepReport | None = None) -> None:
        """Records the report after the core has observed it.  message: its protobuf message."""
        self._begin_event()
        try:
            super().observe(report)
        except InvalidReportError:
            raise
        except BaseException:
            # It may be observed in part, which cannot be replayed.
            self._event_log.drop_event()
            raise
        if message is None:
            message = report_to_proto(report)
        # An engine could add unknown fields of any size.
        message.DiscardUnknownFields()
        # Keep bytes, since a submessage would keep its whole parent message in memory.
        seconds, packed = self._time.now(), message.SerializeToString()
        self._put(lambda: _report_record(seconds, packed, report))

    def set_overrides(self, overrides: Iterable[Override]) -> bool:
        """Records the overrides if they changed, or if the end of one has moved."""
        self._begin_event()
        changed = super().set_overrides(overrides)
        terms = self._terms_now()
        if changed or not _have_same_ends(terms, self._terms):
            self._terms = terms
            self._record("overrides", lambda: _terms_to_proto(terms))
        return changed

    def record_lost_capabilities(
        self, lost_capabilities: Iterable[LostCapability]
    ) -> tuple[LostCapability, ...]:
        """Records the new losses."""
        self._begin_event()
        new_losses = super().record_lost_capabilities(lost_capabilities)
        if new_losses:
            self._record(
                "loss",
                lambda: record_pb2.RecordLoss(lost=map(lost_capability_to_proto, new_losses)),
            )
        return new_losses

    def next_plan(self) -> Plan | None:
        """Records the plan, or that the old one was confirmed."""
        self._begin_event()
        evaluated_at = self._evaluated_at
        plan = super().next_plan()
        if plan is not None or self._evaluated_at != evaluated_at:
            self._record(
                "decision",
                lambda: record_pb2.RecordDecision(
                    plan=None if plan is None else plan_to_proto(plan)
                ),
            )
        return plan

    def force_arm(self, arm: Arm | None) -> Plan:
        """Records the forced arm and its plan."""
        self._begin_event()
        plan = super().force_arm(arm)
        self._record("force", lambda: _force_to_proto(arm, plan))
        return plan

    def make_last_plan(self, lease_seconds: float) -> Plan:
        """Records the last plan."""
        self._begin_event()
        plan = super().make_last_plan(lease_seconds)
        self._record(
            "parting",
            lambda: record_pb2.RecordParting(lease_seconds=lease_seconds, plan=plan_to_proto(plan)),
        )
        return plan

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Records the new constants."""
        self._begin_event()
        super().use_settings(settings, training)
        self._training_settings = training
        self._record(
            "settings", lambda: record_pb2.RecordSettings(**_settings_json(settings, training))
        )

    def use_profile(self, profile: Profile) -> None:
        """Records the new profile."""
        self._begin_event()
        super().use_profile(profile)
        self._profile = profile
        self._record("profile", lambda: record_pb2.RecordProfile(profile_json=profile.to_json()))

    def warm_start_from(self, beliefs: Iterable[AcceptanceSnapshot], where: str) -> None:
        """Records the estimates of the warm start."""
        self._begin_event()
        snapshots = tuple(beliefs)
        super().warm_start_from(snapshots, where)
        self._record(
            "warm_start",
            lambda: record_pb2.RecordWarmStart(
                beliefs_json=warm_start.to_json(snapshots), where=where
            ),
        )

    def note(
        self, kind: "record_pb2.RecordNoteKind.ValueType", count: int = 0, text: str = ""
    ) -> None:
        """Records a note for people, which the core does not get.  count: of lost reports."""
        self._begin_event()
        self._record("note", lambda: record_pb2.RecordNote(kind=kind, count=count, text=text))
        if kind == record_pb2.RECORD_NOTE_KIND_ENDED:
            self._event_log.is_closed = True

    def _record(self, kind: str, make: Callable[[], Message]) -> None:
        """Records the message that `make` will return.  kind: the record's field."""
        self._put(_make_event(self._time.now(), kind, make))

    def _put(self, event: Event) -> None:
        self._event_log.put(event)
        self._last_recorded_training = self._training_now()

    def _begin_event(self) -> None:
        """Prepares the next event: reads the time, records external changes and a due opening."""
        now, event_log = self._time.read(), self._event_log
        training = self._training_now()
        if (
            training is not None
            and training != self._last_recorded_training
            and not event_log.has_gap
        ):
            self._record("training", lambda: _training_to_proto(*training))
        if event_log.can_open:
            event_log.open(_make_event(now, "opening", self._opening_maker()))
            self._last_recorded_training = training

    def _terms_now(self) -> _OverrideTerms:
        return tuple((o, self._event_log.override_end_time(o.override_id)) for o in self.overrides)

    def _training_now(self) -> tuple[TrainingState, bool, int] | None:
        training = self.updates.training
        if training is None:
            return None
        return training.state, training.is_trainer_connected, training.stored_signals

    def _opening_maker(self) -> Callable[[], record_pb2.RecordOpening]:
        """Returns a function that makes the opening message of the core's present state."""
        event_log, spec, profile, terms = self._event_log, self.spec, self._profile, self._terms
        settings, state = (self._settings, self._training_settings), capture_state(self)
        header = record_pb2.RecordOpening(
            wall_seconds=event_log.wall(),
            session=event_log.session,
            part=event_log.openings + 1,
            lost=event_log.lost_events,
            versions=versions(),
            cost_source="profile" if self.profile_id else self.cost_model.prior,
        )

        def make() -> record_pb2.RecordOpening:
            opening = record_pb2.RecordOpening(
                engine=engine_to_proto(spec),
                **_settings_json(*settings),
                profile_json="" if profile is None else profile.to_json(),
                overrides=_terms_to_proto(terms),
                state=state_to_proto(state),
            )
            opening.MergeFrom(header)
            return opening

        return make


def _make_event(seconds: float, kind: str, make: Callable[[], Message]) -> Event:
    # The field of the oneof is chosen by name, which cannot be typed.
    record: Any = record_pb2.Record
    return lambda: record(clock_seconds=seconds, **{kind: make()})


def _report_record(seconds: float, packed: bytes, report: StepReport) -> record_pb2.Record:
    """Returns the original report, with the plan epoch and the probe id that the core assigned."""
    record = record_pb2.Record(clock_seconds=seconds)
    record.report.MergeFromString(packed)
    record.report.plan_epoch, record.report.probe_id = report.plan_epoch, report.probe_id
    return record


def _force_to_proto(arm: Arm | None, plan: Plan) -> record_pb2.RecordForce:
    forced = None if arm is None else record_pb2.RecordArm(drafter=arm.drafter, gamma=arm.gamma)
    return record_pb2.RecordForce(arm=forced, plan=plan_to_proto(plan))


def _terms_to_proto(terms: _OverrideTerms) -> record_pb2.RecordOverrides:
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


def _settings_json(planner: PlannerSettings, training: TrainingSettings) -> dict[str, Any]:
    return {
        "planner_json": json.dumps(asdict(planner)),
        "training_json": json.dumps(asdict(training)),
    }


def _have_same_ends(first: _OverrideTerms, second: _OverrideTerms) -> bool:
    if len(first) != len(second):
        return False
    return all(
        a == b or (a is not None and b is not None and abs(a - b) < _SAME_END_SECONDS)
        for (_, a), (_, b) in zip(first, second, strict=True)
    )
