"""Full information on drafters: whatever runs, every drafter is scored on the verified tokens.

Restated from Not-a-Bandit (Liu et al., ICLR 2026, arXiv 2510.20064).  The tokens that the target
has verified are the truth for every drafter, not only for the one that drafted: each reads them,
and what it would have had accepted follows without asking the target again.  So the choice of a
drafter is learning with full information; nothing has to be explored, as a bandit has to.

The simulated engine serves this to the policy (`FullInformation`): drafters that did not draft are
evaluated on each step's tokens, as far as these go, and the step pays their catch-up price.

The paper's learner, NormalHedge, draws a drafter by weights that grow with the regret towards it.
Here the one with the least loss runs, which is the heaviest: a batch has one drafter, and where a
switch costs, drawing only loses.  The paper's loss is that of acceptance, at one draft length and
with drafters of one cost.  Ours, and generous: the experts are all draft lengths of all drafters,
plain decoding among them, and an arm is worth

    (1 + E[accepted | drafter, gamma]) / C(drafter, gamma, b)         costs from the profile

with E from the conditional acceptance of each position.  It forgets, so that shifts are followed
where the paper starts again at each request.  A position that few have reached leans on the one
before it.  Left out: evaluating in some steps only, as the paper does to save time; a drafter that
is to be scored has to read every token at some time, and pays by the token.

Scores are those of the positions at which the running drafter starts.  A drafter whose acceptance
comes in long runs, as n-grams do, looks better there than it would fare: a run that it would take
in one step is met again by every step that falls into it.
"""

import math
from collections.abc import Sequence

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import RelativeCosts, by_gamma, first_drafter, off_arm
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

MEMORY_SEQUENCES = 400.0
MEMORY_STEPS = 20.0
# The acceptance of the first position before anything was seen: high, so that much is drafted, and
# learnt, at once.  What it and every position's predecessor weigh, in sequences.
FIRST_ACCEPTANCE = 0.8
LEANING_SEQUENCES = 4.0


class FullInformationChoice:
    """The arm that is worth most when every drafter was scored in every step.

    memory_sequences, memory_steps: all but 1/e is forgotten after so many sequence-steps, and not
    before so many steps.
    Raises InvalidInputError for fewer than two drafters, and if the profile lacks an arm.
    """

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        profile: Profile,
        *,
        memory_sequences: float = MEMORY_SEQUENCES,
        memory_steps: float = MEMORY_STEPS,
    ) -> None:
        self._depths = {arm.drafter: max(by_gamma(arms, arm.drafter)) for arm in arms}
        if len(self._depths) < 2:
            raise InvalidInputError(
                "full information", 0, f"only {list(self._depths)} can draft, nothing is to choose"
            )
        off = off_arm(arms, first_drafter(arms))
        self._costs = RelativeCosts(profile, arms, arms[off or 0])
        # Even where nothing is drafted, its drafter is kept in step.
        self._choices = [ArmChoice(i, asleep=False) for i in range(len(arms))]
        self._arms = tuple(arms)
        self._memory_sequences, self._memory_steps = memory_sequences, memory_steps
        self._reached = {d: [0.0] * depth for d, depth in self._depths.items()}
        self._accepted = {d: [0.0] * depth for d, depth in self._depths.items()}
        # Expected accepted drafts of each arm.
        self.expected = self._expectations()

    @property
    def idle_positions(self) -> int:
        """Every position that a drafter can have, and at least one."""
        return max(1, *self._depths.values())

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the arm that is worth most at this batch."""
        costs = self._costs.at(batch_size)
        values = [(1 + e) / cost for e, cost in zip(self.expected, costs, strict=True)]
        return self._choices[values.index(max(values))]

    def observe(self, record: StepRecord, _: float) -> None:
        """Learns from the drafter that ran, and from those that were evaluated beside it."""
        forgotten = record.batch_size / self._memory_sequences
        keep = math.exp(-min(forgotten, 1 / self._memory_steps))
        for sums in (*self._reached.values(), *self._accepted.values()):
            sums[:] = [keep * value for value in sums]
        reached, drafter = record.batch_size, self._arms[record.arm].drafter
        for k, stopped in enumerate(record.counts[:-1]):
            self._reached[drafter][k] += reached
            reached -= stopped
            self._accepted[drafter][k] += reached
        for idle in record.idle:
            mine, accepted = self._reached[idle.drafter], self._accepted[idle.drafter]
            for k in range(len(mine)):
                mine[k] += idle.reached[k]
                accepted[k] += idle.accepted[k]
        self.expected = self._expectations()

    def _expectations(self) -> list[float]:
        """Returns E[accepted] of each arm."""
        by_drafter = {d: self._expected_of(d) for d in self._depths}
        return [by_drafter[arm.drafter][arm.gamma] for arm in self._arms]

    def _expected_of(self, drafter: str) -> list[float]:
        """Returns E[accepted | gamma] for gamma = 0 .. depth."""
        found = [0.0]
        rate, survival = FIRST_ACCEPTANCE, 1.0
        for reached, accepted in zip(self._reached[drafter], self._accepted[drafter], strict=True):
            rate = (accepted + LEANING_SEQUENCES * rate) / (reached + LEANING_SEQUENCES)
            survival *= rate
            found.append(found[-1] + survival)
        return found
