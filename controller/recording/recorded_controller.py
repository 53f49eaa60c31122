"""The decision core with everything written down that it is given, and the plans that come out.

The clock is read once for each thing that happens, so that a moment has one time.  What others
change behind the core's back (the training beside the engine) is noticed before the next thing
happens.  A call that changes nothing (a plan that is not due yet, or a look) leaves no trace.
The first plan is part of the first opening.
"""

import platform
import sys
from collections.abc import Iterable

import numpy as np

import controller
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
from controller.core.training.selective_training import TrainingSettings, TrainingState
from controller.recording.event_log import EventLog
from controller.recording.events import (
    Configured,
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
from controller.wire.plans import plan_to_proto

# An override whose end moves by less was not renewed.
_SAME_END_SECONDS = 1.0


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

    def observe(self, report: StepReport) -> None:
        """Records the report after the core has folded it."""
        self._begin()
        try:
            super().observe(report)
        except InvalidReportError:
            raise
        except BaseException:
            # Half of it may be folded: nobody could do that again.
            self._event_log.break_off()
            raise
        self._put(Reported(report))

    def set_overrides(self, overrides: Iterable[Override]) -> bool:
        """Records the overrides if they changed, or if one of them ends later."""
        self._begin()
        changed = super().set_overrides(overrides)
        terms = self._terms_now()
        if changed or not _same_ends(terms, self._terms):
            self._terms = terms
            self._put(Overridden(terms))
        return changed

    def lose(self, losses: Iterable[LostCapability]) -> tuple[LostCapability, ...]:
        """Records the losses that take something more away."""
        self._begin()
        news = super().lose(losses)
        if news:
            self._put(Lost(news))
        return news

    def next_plan(self) -> Plan | None:
        """Records the plan, or that the old one was confirmed."""
        self._begin()
        before = self._evaluated_at
        plan = super().next_plan()
        if plan is not None or self._evaluated_at != before:
            self._put(Issued(plan))
        return plan

    def force(self, arm: Arm | None) -> Plan:
        """Records the forced arm and its plan."""
        self._begin()
        plan = super().force(arm)
        self._put(Forced(arm, plan_to_proto(plan)))
        return plan

    def last_plan(self, lease_seconds: float) -> Plan:
        """Records the last plan."""
        self._begin()
        plan = super().last_plan(lease_seconds)
        self._put(Parted(lease_seconds, plan_to_proto(plan)))
        return plan

    def use_settings(self, settings: PlannerSettings, training: TrainingSettings) -> None:
        """Records the new constants."""
        self._begin()
        super().use_settings(settings, training)
        self._training_settings = training
        self._put(Configured(settings, training))

    def use_profile(self, profile: Profile) -> None:
        """Records the new profile."""
        self._begin()
        super().use_profile(profile)
        self._profile = profile
        self._put(Profiled(profile))

    def begin_from(self, beliefs: Iterable[Belief], where: str) -> None:
        """Records the estimates that were taken over."""
        self._begin()
        known = tuple(beliefs)
        super().begin_from(known, where)
        self._put(Warmed(known, where))

    def note(self, kind: NoteKind, count: int = 0, text: str = "") -> None:
        """Something that the core is not told, for people."""
        self._begin()
        self._put(Noted(kind, count, text))
        if kind is NoteKind.ENDED:
            self._event_log.over = True

    def _put(self, event: Event) -> None:
        self._event_log.put(Moment(self._time.now(), event))
        self._told_training = self._training_now()

    def _begin(self) -> None:
        """Prepares for the next event: the time, what others have changed, a due opening."""
        now, event_log = self._time.read(), self._event_log
        training = self._training_now()
        if training is not None and training != self._told_training and not event_log.broken:
            self._put(Trained(*training))
        if event_log.can_open:
            event_log.open(Moment(now, self._opening()))
            self._told_training = training

    def _terms_now(self) -> tuple[Term, ...]:
        return tuple(Term(o, self._event_log.end_of(o.override_id)) for o in self.overrides)

    def _training_now(self) -> tuple[TrainingState, bool, int] | None:
        training = self.updates.training
        if training is None:
            return None
        return training.state, training.attended, training.stored

    def _opening(self) -> Opening:
        return Opening(
            spec=self.spec,
            planner=self._settings,
            training=self._training_settings,
            profile=self._profile,
            terms=self._terms,
            state=capture(self),
            wall_seconds=self._event_log.wall(),
            session=self._event_log.session,
            part=self._event_log.parts + 1,
            lost=self._event_log.lost,
            versions=versions(),
            cost_source="profile" if self.profile_id else self.cost.prior,
        )


def _same_ends(some: tuple[Term, ...], others: tuple[Term, ...]) -> bool:
    if len(some) != len(others):
        return False
    return all(
        a.ends_at == b.ends_at
        or (
            a.ends_at is not None
            and b.ends_at is not None
            and abs(a.ends_at - b.ends_at) < _SAME_END_SECONDS
        )
        for a, b in zip(some, others, strict=True)
    )
