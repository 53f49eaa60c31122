"""TIDE's adaptive drafter: speculation of one fixed length, on or off.

Restated from TIDE, arXiv 2602.05145, section 4.1 (no code was published).  With a target latency
T(n) and a drafter latency D0 profiled at start, acceptance rate alpha and c(b) = D0 / T(b),
beta(b) = T(b (gamma + 1)) / T(b):

    E[l] = (1 - alpha^(gamma+1)) / (1 - alpha)                                    (Eq. 2)
    practical speedup = E[l] / (c(b) gamma + beta(b))                             (Eq. 5)

and speculation runs while the speedup is above 1.  The denominator is (gamma D0 + T(b (gamma + 1)))
/ T(b): what a step at gamma costs relative to a plain one at the same batch.  A profile measures
just that ratio, C(gamma, b) / C(0, b), so the cells are used as they are, without the assumption
that D0 is constant: interpolated in log b, held constant outside.

alpha comes from an average of the acceptance length through Eq. 2.  As gamma is fixed, Eq. 5 undoes
that inversion, and the rule becomes a threshold on the acceptance length, as section 5 applies it.
The average forgets by sequences, so that batch 1 and batch 256 track alike.  Over the first
`memory_sequences` it is a plain mean and speculation stays on, as Algorithm 1 starts its averages.

Given to it: the costs that the controller is given.  Ours, and generous: while off it sees nothing
and would stay off permanently, so it drafts in one of `recheck_steps` steps.  Left out: the
training half of TIDE, which changes the drafter and not this decision.
"""

import math
from collections.abc import Sequence

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.peers.common import RelativeCosts, accepted_tokens, on_and_off_choices
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin


class TideThreshold:
    """One arm or plain decoding, by Eq. 5.

    gamma: the draft length (nearest available, of `drafter`; default: the first one).
    memory_sequences: sequence-steps after which the average has forgotten all but 1/e.
    Raises InvalidInputError if the profile lacks the two arms.
    """

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        profile: Profile,
        gamma: int = 3,
        *,
        drafter: str | None = None,
        recheck_steps: int = 100,
        memory_sequences: float = 50.0,
    ) -> None:
        self._on, off = on_and_off_choices(arms, gamma, drafter)
        self._off = off or self._on
        # With plain decoding alone, or without it, there is no choice.
        self._has_no_choice = arms[self._on.arm].gamma == 0 or off is None
        self._recheck_steps = recheck_steps
        self._memory_sequences = memory_sequences
        # The average, tokens a sequence and step; 0 before anything was seen.
        self.acceptance_length = 0.0
        self._observed_sequences = 0
        self._off_steps = 0
        if not self._has_no_choice:
            self._costs = RelativeCosts(profile, [arms[self._on.arm]], arms[self._off.arm])

    def relative_cost(self, batch_size: int) -> float:
        """c(b) gamma + beta(b): the acceptance length at which speculation breaks even."""
        return self._costs.ratios_at(batch_size)[0]

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Drafts while the practical speedup at this batch is above 1."""
        always_drafts = self._has_no_choice or self._observed_sequences < self._memory_sequences
        if always_drafts or self.acceptance_length > self.relative_cost(batch_size):
            self._off_steps = 0
            return self._on
        self._off_steps += 1
        if self._off_steps >= self._recheck_steps:
            self._off_steps = 0
            return self._on
        return self._off

    def observe(self, record: StepRecord, _: float) -> None:
        """Adds a step that drafted to the average."""
        if len(record.counts) < 2:
            return
        length = 1.0 + accepted_tokens(record.counts) / record.batch_size
        if self._observed_sequences < self._memory_sequences:
            self._observed_sequences += record.batch_size
            weight = record.batch_size / self._observed_sequences
        else:
            weight = 1.0 - math.exp(-record.batch_size / self._memory_sequences)
        self.acceptance_length += weight * (length - self.acceptance_length)
