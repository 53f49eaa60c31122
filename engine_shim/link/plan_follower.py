"""Determines which draft length the engine runs now, from the newest plan and its lease.

    no plan yet ---------------------------------------------> SAFE_DEFAULT
    plan arrives --> PLAN --(lease over)--> GRACE --(grace over)--> SAFE_DEFAULT
                      ^                       |                         |
                      +------- a plan arrives +-------------------------+

Pure: time is passed in, and nothing here does I/O.  A choice always comes from one plan as it was
issued: rows of two plans are never mixed, and no row outlives its plan's lease plus the grace.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

from engine_shim.link.packets import PlanPacket, ProbeEntry, RowEntry
from speculation.v1.plan_pb2 import REGIME_MODE_COLLECT, REGIME_MODE_ONLINE

_REMEMBERED_PROBES: Final = 4096
_NEVER: Final = float("-inf")


class Source(Enum):
    """Names where a choice comes from."""

    PLAN = "plan"  # a plan with a valid lease
    GRACE = "grace"  # the last plan; its lease is over
    SAFE_DEFAULT = "safe-default"  # no plan, or the grace is over too


class StepChoice(NamedTuple):
    """Names what the next step runs.

    Hand `epoch`, `probe_id` and `session` back with the report of the step that ran it; a source
    other than PLAN is to be reported with the flag UNSTEERED.
    `asleep`: at gamma 0, nothing of the drafter runs.
    """

    drafter_index: int
    gamma: int
    asleep: bool
    epoch: int
    probe_id: int
    source: Source
    session: int


def safe_choice(gamma: int) -> StepChoice:
    """The choice of an engine without a valid lease: its first drafter at this draft length."""
    return StepChoice(
        0, gamma, asleep=False, epoch=0, probe_id=0, source=Source.SAFE_DEFAULT, session=0
    )


class PlanFollower:
    """The plan in use.  `choose` is to be called once for every decode step that will run.

    `arms`: (drafter index, gamma) pairs that the engine can run.  `lapses` counts how often a
    lease ran out with no newer plan available; `taken`, the plans; `source`: of the last choice.
    `plan`: the newest one that was taken, however old; `lease_end`: when its lease ends or ended,
    in seconds of the clock passed in, -inf before a plan.
    """

    def __init__(
        self, arms: Collection[tuple[int, int]], safe: StepChoice, grace_seconds: float
    ) -> None:
        self._arms = frozenset(arms)
        self.safe = safe
        self._grace_seconds = grace_seconds
        self.plan: PlanPacket | None = None
        self.lease_end = _NEVER
        # Rows that fit the engine: those of a renewed plan are often the very same object.
        self._fitting: tuple[RowEntry, ...] = ()
        self._bounds: list[int] = []
        # The choice of each row once it has been made; a row with an open probe stays None.
        self._ready: list[StepChoice | None] = []
        self._steps_left: dict[int, int] = {}
        self._lapsed = False
        self.lapses = self.taken = 0
        self.source = Source.SAFE_DEFAULT

    def can_accept(self, plan: PlanPacket) -> bool:
        """False when it is older than the one in use, or asks for an arm the engine has not."""
        old = self.plan
        if old is not None and old.session == plan.session and plan.epoch < old.epoch:
            return False
        if plan.rows is self._fitting:
            return True
        arms = self._arms
        fits = all(
            (drafter_index, gamma) in arms
            and (probe is None or (probe.drafter_index, probe.gamma) in arms)
            for _, drafter_index, gamma, _, probe in plan.rows
        )
        if fits:
            self._fitting = plan.rows
        return fits

    def uses(self, plan: PlanPacket) -> bool:
        """Whether this very plan was taken last; its lease may have been renewed."""
        old = self.plan
        return old is not None and (old.session, old.epoch) == (plan.session, plan.epoch)

    def accept(self, plan: PlanPacket, now: float) -> bool:
        """Takes a plan into use; False, and no change, when it cannot be accepted.

        The lease counts from the plan's arrival at the agent (which cannot lie in the future).
        """
        if not self.can_accept(plan):
            return False
        if self.plan is not None and self.plan.session != plan.session:
            self._steps_left.clear()
        self._remember([row.probe for row in plan.rows if row.probe is not None])
        # The last row serves every larger batch, so its bound is not needed.
        self._bounds = [row[0] for row in plan.rows[:-1]]
        self._ready = [None] * len(plan.rows)
        self.lease_end = min(plan.arrival_ns * 1e-9, now) + plan.lease_ms * 1e-3
        self.plan = plan
        self._lapsed = False
        self.taken += 1
        return True

    def drop_plan(self) -> None:
        """Chooses the safe default from now on, until a plan is accepted."""
        self.plan, self.lease_end, self.source = None, _NEVER, Source.SAFE_DEFAULT

    def source_at(self, now: float) -> Source:
        """Returns where `choose` would take a choice from, without choosing."""
        if now < self.lease_end:
            return Source.PLAN
        if self.plan is None or now >= self.lease_end + self._grace_seconds:
            return Source.SAFE_DEFAULT
        return Source.GRACE

    def collects_at(self, now: float) -> bool:
        """Whether training signals are to be kept; not on the safe default."""
        plan = self.plan
        if plan is None or plan.regime_mode != REGIME_MODE_COLLECT:
            return False
        return self.source_at(now) is not Source.SAFE_DEFAULT

    def stride_at(self, now: float) -> int:
        """Rounds between two online updates of the drafter; 0 for none, and in free flight."""
        plan = self.plan
        if plan is None or plan.regime_mode != REGIME_MODE_ONLINE:
            return 0
        return 0 if self.source_at(now) is Source.SAFE_DEFAULT else plan.regime_stride

    def choose(self, batch_size: int, now: float) -> StepChoice:
        """The choice for a step over `batch_size` sequences."""
        if now < self.lease_end:
            self.source = Source.PLAN
            index = bisect_left(self._bounds, batch_size)
            choice = self._ready[index]
            return self._make(index) if choice is None else choice
        return self._unsteered(batch_size, now)

    def _make(self, index: int) -> StepChoice:
        """A step of the row's probe while it has any left, else the row's own choice, kept."""
        plan = self.plan
        assert plan is not None  # there is no lease without one
        row = plan.rows[index]
        probe = row.probe
        if probe is not None and (left := self._steps_left[probe.probe_id]):
            self._steps_left[probe.probe_id] = left - 1
            return StepChoice(
                probe.drafter_index,
                probe.gamma,
                asleep=row.asleep and probe.gamma == 0,
                epoch=plan.epoch,
                probe_id=probe.probe_id,
                source=Source.PLAN,
                session=plan.session,
            )
        self._ready[index] = choice = _of_row(plan, index, Source.PLAN)
        return choice

    def _unsteered(self, batch_size: int, now: float) -> StepChoice:
        """Chooses without a lease: the last plan continues without its probes."""
        self.source = source = self.source_at(now)
        if self.plan is None:
            return self.safe
        if not self._lapsed:
            self._lapsed = True
            self.lapses += 1
        if source is Source.SAFE_DEFAULT:
            return self.safe
        return _of_row(self.plan, bisect_left(self._bounds, batch_size), source)

    def _remember(self, probes: Sequence[ProbeEntry]) -> None:
        """A probe identifier seen before keeps what is left of its steps.

        The newest 4096 identifiers are remembered: enough that a renewed plan never starts a
        probe again, and bounded for an engine that runs for months.
        """
        ledger = self._steps_left
        for probe in probes:
            ledger[probe.probe_id] = ledger.pop(probe.probe_id, probe.steps)
        while len(ledger) > _REMEMBERED_PROBES:
            del ledger[next(iter(ledger))]


def _of_row(plan: PlanPacket, index: int, source: Source) -> StepChoice:
    _, drafter_index, gamma, asleep, _ = plan.rows[index]
    asleep = asleep and gamma == 0  # the flag may speak of the row's probe only
    return StepChoice(drafter_index, gamma, asleep, plan.epoch, 0, source, plan.session)
