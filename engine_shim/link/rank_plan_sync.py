"""Makes all ranks of an engine adopt the same plan before the same step.

With tensor parallelism every rank runs its own scheduler, and all of them must launch the same
step.  Only rank 0 has a link to the sidecar.  Its updates travel with the engine's own broadcast of
requests (no collective is added).  Every rank, including rank 0, adopts an update as it handles
those requests, before the same step:

  rank 0     outgoing   a new plan has come, or the lease of the last one has run out
  engine                broadcasts the update, in one list with the requests that came in
  all ranks  adopt
  all ranks  choose     from the plan, the batch and the adopted time: the same on every rank

An engine may skip or delay a broadcast, so an update is sent until rank 0 has adopted it itself.
An engine of one rank adopts an update at once, at the start of a step (`receive_and_adopt`).
"""

from time import monotonic
from typing import NamedTuple

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import ArrivedPlan
from engine_shim.link.plan_follower import PlanFollower, StepChoice
from speculation.v1.plan_pb2 import MixtureRule


class RankUpdate(NamedTuple):
    """An update that all ranks adopt together.

    sequence_number: ascending.  now: rank 0's monotonic clock in seconds; all ranks check the lease
    against it.  plan: None if only time has passed.
    """

    sequence_number: int
    now: float
    plan: ArrivedPlan | None


class RankPlanSync:
    """Adopts updates on this rank.

    plan_follower: this rank's plan follower.  link: of rank 0; None on the other ranks.
    """

    def __init__(self, plan_follower: PlanFollower, link: EngineLink | None) -> None:
        self._plan_follower = plan_follower
        self._link = link
        self._last_adopted = self._last_sent = RankUpdate(0, monotonic(), None)
        # Source of the choices at the adopted time.
        self._choice_source = plan_follower.choice_source(self._last_adopted.now)
        # The last choice and its batch size.  Between two updates only a probe, which counts its
        # steps, changes the choice.
        self._choice: StepChoice | None = None
        self._batch_size = 0

    def outgoing_updates(self) -> list[RankUpdate]:
        """Returns the update to broadcast, if any; rank 0 calls it between two steps."""
        if self._link is None:
            return []
        plan, now = self._link.receive(), monotonic()
        last_sent, sequence_number = self._last_sent, self._last_sent.sequence_number
        is_pending = sequence_number > self._last_adopted.sequence_number
        if plan is not None:
            self._last_sent = RankUpdate(sequence_number + 1, now, plan)
        elif is_pending:
            self._last_sent = last_sent._replace(now=now)
        elif self._plan_follower.choice_source(now) is not self._choice_source:
            self._last_sent = RankUpdate(sequence_number + 1, now, None)
        else:
            return []
        return [self._last_sent]

    def receive_and_adopt(self) -> None:
        """Adopts a new plan at once, at the start of a step; for an engine of one rank."""
        if self._link is None:
            return
        plan, now = self._link.receive(), monotonic()
        if plan is not None or self._plan_follower.choice_source(now) is not self._choice_source:
            self.adopt(RankUpdate(self._last_adopted.sequence_number + 1, now, plan))

    def adopt(self, update: RankUpdate) -> None:
        """Adopts, on every rank, an update from rank 0.

        An update that was adopted before is ignored.
        """
        if update.sequence_number <= self._last_adopted.sequence_number:
            return
        self._last_adopted = update
        self._choice = None
        if update.plan is not None:
            self._plan_follower.accept(update.plan, update.now)
        self._choice_source = self._plan_follower.choice_source(update.now)

    def update_stride(self) -> int:
        """Returns the rounds between two online updates of the drafter, 0 for no updates."""
        return self._plan_follower.update_stride(self._last_adopted.now)

    def collects_signals(self) -> bool:
        """Whether training signals are to be collected."""
        return self._plan_follower.collects_signals(self._last_adopted.now)

    def draft_version(self) -> int | None:
        """Returns the version of the drafter that is to serve; None before the first plan."""
        plan = self._plan_follower.plan
        return None if plan is None else plan.draft_version

    def mixture_rules(self) -> tuple[MixtureRule, ...]:
        """Returns the mixture rules of the newest plan."""
        return self._plan_follower.mixture_rules

    def choose(self, batch_size: int) -> StepChoice:
        """Returns the choice for the decode step that begins now; call it once per step."""
        if self._choice is not None and batch_size == self._batch_size:
            return self._choice
        choice = self._plan_follower.choose(batch_size, self._last_adopted.now)
        self._choice = None if choice.probe_id else choice
        self._batch_size = batch_size
        return choice
