"""One decision for all ranks of an engine.

With tensor parallelism every rank runs a scheduler of its own, and all of them must launch the same
step.  Only rank 0 has a link to the sidecar.  What it takes in travels with the engine's own
broadcast of requests (no collective is added), and every rank, rank 0 as well, adopts it as it
handles those requests, before the same step:

  rank 0     outgoing   a new plan has come, or the lease of the last one has run out
  engine                broadcasts it, in one list with the requests that came in
  all ranks  adopt
  all ranks  choose     from the plan, the batch and the adopted time: alike everywhere

An engine may leave a broadcast out or hold it back, so an update is sent until rank 0 has adopted
it itself.  An engine of one rank adopts it at once, as a step begins (`take_in`).
"""

from time import monotonic
from typing import NamedTuple

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import ArrivedPlan
from engine_shim.link.plan_follower import PlanFollower, StepChoice
from speculation.v1.plan_pb2 import MixtureRule


class RankUpdate(NamedTuple):
    """Carries what all ranks adopt together.

    number: counts up.  now: rank 0's monotonic clock in seconds; all judge the lease by it.
    plan: None when only time has passed.
    """

    number: int
    now: float
    plan: ArrivedPlan | None


class Ranks:
    """This rank's part.  steering: its copy; link: rank 0's, None on the others."""

    def __init__(self, steering: PlanFollower, link: EngineLink | None) -> None:
        self._steering = steering
        self._link = link
        self._adopted = self._sent = RankUpdate(0, monotonic(), None)
        # Where choices come from at the adopted time.
        self._source = steering.source_at(self._adopted.now)
        # The last choice, and for how many sequences.  Between two updates nothing changes it but a
        # probe, which counts its steps.
        self._choice: StepChoice | None = None
        self._batch_size = 0

    def outgoing(self) -> list[RankUpdate]:
        """On rank 0, between two steps: what has to reach all ranks."""
        if self._link is None:
            return []
        plan, now = self._link.receive(), monotonic()
        sent, number = self._sent, self._sent.number
        waiting = number > self._adopted.number
        if plan is not None:
            self._sent = RankUpdate(number + 1, now, plan)
        elif waiting:
            self._sent = sent._replace(now=now)
        elif self._steering.source_at(now) is not self._source:
            self._sent = RankUpdate(number + 1, now, None)
        else:
            return []
        return [self._sent]

    def take_in(self) -> None:
        """Adopts what has come at once, for an engine of one rank, as a step begins."""
        if self._link is None:
            return
        plan, now = self._link.receive(), monotonic()
        if plan is not None or self._steering.source_at(now) is not self._source:
            self.adopt(RankUpdate(self._adopted.number + 1, now, plan))

    def adopt(self, update: RankUpdate) -> None:
        """Adopts, on every rank, what rank 0 sent.

        An update that was adopted before is ignored.
        """
        if update.number <= self._adopted.number:
            return
        self._adopted = update
        self._choice = None
        if update.plan is not None:
            self._steering.accept(update.plan, update.now)
        self._source = self._steering.source_at(update.now)

    def stride(self) -> int:
        """Rounds between two online updates of the drafter, 0 for none."""
        return self._steering.stride_at(self._adopted.now)

    def collects(self) -> bool:
        """Whether training signals are to be kept."""
        return self._steering.collects_at(self._adopted.now)

    def draft_version(self) -> int | None:
        """Returns the version of the drafter that is to serve; None before the first plan."""
        plan = self._steering.plan
        return None if plan is None else plan.draft_version

    def rules(self) -> tuple[MixtureRule, ...]:
        """Returns the rules of mixtures in the newest plan."""
        return self._steering.rules

    def choose(self, batch_size: int) -> StepChoice:
        """Chooses what the decode step that begins now runs; called once for each step."""
        if self._choice is not None and batch_size == self._batch_size:
            return self._choice
        choice = self._steering.choose(batch_size, self._adopted.now)
        self._choice = None if choice.probe_id else choice
        self._batch_size = batch_size
        return choice
