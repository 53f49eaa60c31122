"""Full information on drafters: whatever runs, every drafter is scored on the verified tokens.

Restated from Not-a-Bandit (Liu et al., ICLR 2026, arXiv 2510.20064).  The verified tokens are known
for every drafter, not only for the one that drafted: each drafter reads them, and its accepted
length follows without another pass of the target.  So the choice of a drafter is learning with full
information; unlike a bandit, it needs no exploration.

The simulated engine does this for the policy (`FullInformation`): idle drafters are evaluated on
the tokens of each step, and the step pays their catch-up cost.

The paper's learner, NormalHedge, draws a drafter by weights that grow with the regret towards it.
Here the drafter with the least loss runs, which has the largest weight: a batch has one drafter,
and with a switch cost random draws only lose.  The paper's loss is that of acceptance, at one draft
length and with drafters of equal cost.  Ours, and generous: the experts are all draft lengths of
all drafters, plain decoding included, and the value of an arm is

    (1 + E[accepted | drafter, gamma]) / C(drafter, gamma, b)         costs from the profile

with E from the conditional acceptance of each position.  Old evidence decays to follow shifts; the
paper instead starts again at each request.  A position with little evidence is shrunk towards the
previous one.  Left out: the evaluation in only some steps, with which the paper saves time, because
a scored drafter has to read every token at some time and pays per token.

Scores are measured at the positions where the running drafter starts.  They overestimate a drafter
that is accepted in long runs (n-grams): a run that it would take in one step is counted again by
every step that starts within the run.
"""

import math
from collections.abc import Sequence

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import RelativeCosts, arms_by_gamma, first_drafter, off_arm
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

MEMORY_SEQUENCES = 400.0
MEMORY_STEPS = 20.0
# The prior acceptance of the first position: high, so that much is drafted and learnt at once.  The
# weight of this prior, and of a position's predecessor, in sequences.
FIRST_ACCEPTANCE = 0.8
PRIOR_WEIGHT_SEQUENCES = 4.0


class FullInformationChoice:
    """Chooses the arm of the highest value; every drafter is scored in every step.

    memory_sequences, memory_steps: evidence decays to 1/e after `memory_sequences` sequence-steps,
    but not before `memory_steps` steps.
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
        self._depths = {arm.drafter: max(arms_by_gamma(arms, arm.drafter)) for arm in arms}
        if len(self._depths) < 2:
            raise InvalidInputError(
                "full information", 0, f"only {list(self._depths)} can draft: no choice is possible"
            )
        off = off_arm(arms, first_drafter(arms))
        self._costs = RelativeCosts(profile, arms, arms[off or 0])
        # The drafter stays awake even if nothing is drafted.
        self._choices = [ArmChoice(i, asleep=False) for i in range(len(arms))]
        self._arms = tuple(arms)
        self._memory_sequences, self._memory_steps = memory_sequences, memory_steps
        self._reached = {d: [0.0] * depth for d, depth in self._depths.items()}
        self._accepted = {d: [0.0] * depth for d, depth in self._depths.items()}
        # Expected accepted drafts of each arm.
        self.expected = self._expectations()

    @property
    def idle_positions(self) -> int:
        """Returns the largest number of positions of a drafter, at least 1."""
        return max(1, *self._depths.values())

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the arm of the highest value at this batch size."""
        costs = self._costs.ratios_at(batch_size)
        values = [(1 + e) / cost for e, cost in zip(self.expected, costs, strict=True)]
        return self._choices[values.index(max(values))]

    def observe(self, record: StepRecord, _: float) -> None:
        """Adds the evidence of the drafter that ran, and of the evaluated idle drafters."""
        forgotten_share = record.batch_size / self._memory_sequences
        decay = math.exp(-min(forgotten_share, 1 / self._memory_steps))
        for sums in (*self._reached.values(), *self._accepted.values()):
            sums[:] = [decay * value for value in sums]
        reached, drafter = record.batch_size, self._arms[record.arm].drafter
        for k, stopped in enumerate(record.counts[:-1]):
            self._reached[drafter][k] += reached
            reached -= stopped
            self._accepted[drafter][k] += reached
        for idle in record.idle_counts:
            reached_sums, accepted_sums = self._reached[idle.drafter], self._accepted[idle.drafter]
            for k in range(len(reached_sums)):
                reached_sums[k] += idle.reached[k]
                accepted_sums[k] += idle.accepted[k]
        self.expected = self._expectations()

    def _expectations(self) -> list[float]:
        """Returns E[accepted] of each arm."""
        by_drafter = {d: self._expected_by_gamma(d) for d in self._depths}
        return [by_drafter[arm.drafter][arm.gamma] for arm in self._arms]

    def _expected_by_gamma(self, drafter: str) -> list[float]:
        """Returns E[accepted | gamma] for gamma = 0 .. depth."""
        expected = [0.0]
        rate, survival = FIRST_ACCEPTANCE, 1.0
        for reached, accepted in zip(self._reached[drafter], self._accepted[drafter], strict=True):
            rate = (accepted + PRIOR_WEIGHT_SEQUENCES * rate) / (reached + PRIOR_WEIGHT_SEQUENCES)
            survival *= rate
            expected.append(expected[-1] + survival)
        return expected
