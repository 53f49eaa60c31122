"""A little decode loop in virtual time: known acceptance, known costs, records one step late."""

import random
from collections import deque
from dataclasses import dataclass

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, Fingerprint
from controller.core.step_report import NO_FLAGS
from simulator.policy import Policy, StepRecord
from tests.support.accepted_counts import accepted_counts

GAMMAS = (0, 1, 2, 3, 5, 7)
ARMS = tuple(Arm("mtp", gamma) for gamma in GAMMAS)


def step_seconds(gamma, batch_size):
    """Flat, then compute-bound past a couple of hundred tokens."""
    draft = 0.0009 * gamma + (0.0006 if gamma else 0.0)
    return 0.008 + draft + 0.00003 * max(0, batch_size * (gamma + 1) - 48)


def expected_accepted(alpha, gamma):
    return sum(alpha**k for k in range(1, gamma + 1))


def rate(arm, batch_size, alpha):
    """Tokens per second of an arm when all is known."""
    return (
        batch_size * (1 + expected_accepted(alpha, arm.gamma)) / step_seconds(arm.gamma, batch_size)
    )


def best_arm(arms, batch_size, alpha):
    return max(range(len(arms)), key=lambda i: rate(arms[i], batch_size, alpha))


def profile_of(arms=ARMS, sizes=(1, 4, 16, 64, 256)):
    cells = tuple(
        ProfileCell(arm.drafter, arm.gamma, size, step_seconds(arm.gamma, size), 0.0, 20)
        for arm in arms
        for size in sizes
    )
    names = sorted({arm.drafter for arm in arms})
    return Profile(Fingerprint("t"), tuple(DrafterIdentity(n) for n in names), 512.0, 0.0, cells)


def record(arm_index, arms, counts, step=0, seconds=0.01):
    batch_size = sum(counts)
    assert len(counts) == arms[arm_index].gamma + 1
    return StepRecord(
        step, batch_size, 512 * batch_size, arm_index, list(counts), seconds, NO_FLAGS, 0
    )


@dataclass
class Loop:
    """Drives one policy; `chosen` and `asleep` list what it asked for, `regret` the share lost."""

    policy: Policy
    arms: tuple[Arm, ...] = ARMS
    seed: int = 0
    noise: float = 0.03
    lag: int = 1

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.chosen = []
        self.asleep = []
        self.now = 0.0
        self.tokens = 0
        self.step = 0
        self.late: deque[StepRecord] = deque()

    def run(self, steps, batch_size, alpha):
        """The arms that the policy chose, step by step."""
        first = len(self.chosen)
        for _ in range(steps):
            while len(self.late) > self.lag:
                self.policy.observe(self.late.popleft(), self.now)
            choice = self.policy.choose(batch_size, self.now)
            gamma = self.arms[choice.arm].gamma
            counts = accepted_counts(self.rng, min(batch_size, 512), gamma, alpha)
            counts[0] += batch_size - sum(counts)
            seconds = step_seconds(gamma, batch_size) * self.rng.lognormvariate(0, self.noise)
            self.now += seconds
            self.tokens += batch_size + sum(k * n for k, n in enumerate(counts))
            self.late.append(record(choice.arm, self.arms, counts, self.step, seconds))
            self.step += 1
            self.chosen.append(choice.arm)
            self.asleep.append(choice.asleep)
        return self.chosen[first:]

    def share_of_best(self, chosen, batch_size, alpha):
        """True tokens per second of what ran over the best arm's."""
        seconds = sum(step_seconds(self.arms[i].gamma, batch_size) for i in chosen)
        tokens = sum(1 + expected_accepted(alpha, self.arms[i].gamma) for i in chosen)
        best = rate(self.arms[best_arm(self.arms, batch_size, alpha)], batch_size, alpha)
        return batch_size * tokens / seconds / best


def constant(policy, batch_size, rates, steps):
    """Chosen arms when arm i gives exactly rates[i] tokens per second, seen at once."""
    chosen = []
    for _ in range(steps):
        arm = policy.choose(batch_size, 0.0).arm
        chosen.append(arm)
        counts = [batch_size] + [0] * ARMS[arm].gamma
        policy.observe(record(arm, ARMS, counts, seconds=batch_size / rates[arm]), 0.0)
    return chosen
