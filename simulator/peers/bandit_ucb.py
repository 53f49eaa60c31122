"""An upper-confidence-bound bandit over arms, as in BanditSpec.

Restated from BanditSpec (Hou et al., ICML 2025, arXiv 2505.15141): every draft length is an arm of
a stochastic bandit, tried in turn for two rounds and then chosen by

    score_i = mean reward_i / best mean reward + exploration * sqrt(ln t / n_i)

with n_i the steps of arm i and t their sum.  The paper's reward is the tokens a step gains, which
grows with every longer draft and can never choose gamma = 0; its released code rewards tokens over
wall seconds.  Both are here, the second is the default.  Rewards are divided by the best mean, as
the bound wants them in [0, 1].

Ours, and generous: one bandit per octave of the batch size (the paper's batch is constant); every
drafter's arms take part; `exploration` is far below UCB1's sqrt(2), which at these small gaps would
still explore after a million steps; `discount` < 1 weights a sample by discount^age (age in the
octave's steps), to follow shifting traffic.  It receives no costs and no profile.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from controller.core.engine_spec import Arm
from simulator.peers.common import accepted_tokens, octave
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

EXPLORATION = 0.1
ROUNDS = 2
# Weights grow instead of old ones being faded; past this they are scaled back.
_WEIGHT_MAX = 1e100


class Reward(Enum):
    """The reward of a step."""

    TOKENS_PER_SECOND = "tokens-per-second"
    TOKENS_PER_STEP = "tokens-per-step"  # per sequence


@dataclass(slots=True)
class _Bandit:
    """State of one octave.  weights, rewards: [arms] sums.  weight: of the newest step.

    means, weight_roots: [arms] rewards / weights, and square roots of the weights.
    """

    weights: list[float]
    rewards: list[float]
    means: list[float]
    weight_roots: list[float]
    weight: float = 1.0
    total: float = 0.0
    choice_count: int = 0


class UcbBandit:
    """UCB over all arms, one bandit per octave of the batch size.  discount: in (0, 1]."""

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        reward: Reward = Reward.TOKENS_PER_SECOND,
        exploration: float = EXPLORATION,
        discount: float = 1.0,
    ) -> None:
        arm_count = len(arms)
        self._choices = [ArmChoice(i) for i in range(arm_count)]
        self._per_second = reward is Reward.TOKENS_PER_SECOND
        self._exploration = exploration
        self._growth = 1.0 / discount
        self._by_octave = defaultdict[int, _Bandit](
            lambda: _Bandit(
                [0.0] * arm_count, [0.0] * arm_count, [0.0] * arm_count, [0.0] * arm_count
            )
        )

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the arm with the highest bound, once each has been tried."""
        bandit = self._by_octave[octave(batch_size)]
        arms = len(self._choices)
        if bandit.choice_count < ROUNDS * arms:
            bandit.choice_count += 1
            return self._choices[(bandit.choice_count - 1) % arms]
        if 0.0 in bandit.weights:
            # Its trial has not been reported yet, or has decayed to zero.
            return self._choices[bandit.weights.index(0.0)]
        means = bandit.means
        samples = bandit.total / bandit.weight
        bonus = self._exploration * math.sqrt(math.log(max(samples, 1.0)) * bandit.weight)
        bonus *= max(means)
        scores = [m + bonus / root for m, root in zip(means, bandit.weight_roots, strict=True)]
        return self._choices[scores.index(max(scores))]

    def observe(self, record: StepRecord, _: float) -> None:
        """Rewards the arm that ran."""
        bandit = self._by_octave[octave(record.batch_size)]
        tokens = record.batch_size + accepted_tokens(record.counts)
        divisor = record.step_seconds if self._per_second else record.batch_size
        bandit.weight *= self._growth
        weight = bandit.weight
        bandit.weights[record.arm] += weight
        bandit.rewards[record.arm] += weight * tokens / divisor
        bandit.total += weight
        _derive(bandit, record.arm)
        if weight > _WEIGHT_MAX:
            _rescale(bandit)


def _derive(bandit: _Bandit, arm: int) -> None:
    weight = bandit.weights[arm]
    bandit.weight_roots[arm] = math.sqrt(weight)
    bandit.means[arm] = bandit.rewards[arm] / weight if weight else 0.0


def _rescale(bandit: _Bandit) -> None:
    factor = 1.0 / bandit.weight
    # A weight that underflows to zero counts as an arm that was never tried.
    bandit.weights = [w * factor for w in bandit.weights]
    bandit.rewards = [r * factor for r in bandit.rewards]
    bandit.total *= factor
    bandit.weight = 1.0
    for arm in range(len(bandit.weights)):
        _derive(bandit, arm)
