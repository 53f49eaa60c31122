"""How much a policy gains over plain decoding in any stretch of a run, by expected tokens.

    ratio of a stretch = sum_i tokens_i C_off(B_i, kv_i) / B_i  /  sum_i seconds_i

tokens_i: what step i gains on average at the true acceptance of the requests in its batch.
seconds_i: what it takes without noise, including what a switch and catching up cost.  The numerator
is what plain decoding would have taken for the same tokens at the same batches and contexts, so the
two need not be aligned.  The luck of a step has no weight, as with the oracle
(docs/simulation.md): a kind of requests is worth its mean, from a sequential replay.  In traffic
with memory requests of a kind differ, and a policy may find that out: there, each is worth its own.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.comparison.contestants import make_controller
from simulator.comparison.truth import Truth
from simulator.engine import EngineOptions, simulate
from simulator.policy import ArmChoice, Policy, Situation, StepRecord
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import CostSurface
from simulator.workload import ClosedLoop, RequestPool, Workload

WINDOW = 500
# What is wanted: below BAR in no window, but for a small share of scenarios, which stay above
# FLOOR.  docs/measured.md says how far it is reached.
BAR, SHARE_BELOW_BAR, FLOOR = 0.98, 0.001, 0.95


class WatchedPolicy:
    """A policy that is shown nothing more than before, and a record of the truth of its steps.

    expected: [kinds, arms] of E[accepted | arm], see `Truth`.
    """

    def __init__(
        self,
        policy: Policy,
        surface: CostSurface,
        options: EngineOptions,
        expected: NDArray[np.float64],
    ) -> None:
        self._policy = policy
        self._surface, self._options, self._expected = surface, options, expected
        self._drafter_of = [
            [d.name for d in surface.drafters].index(arm.drafter) for arm in surface.arms
        ]
        self._gammas = [arm.gamma for arm in surface.arms]
        self._off_arm = self._gammas.index(0)
        self._situation: Situation | None = None
        self.arms: list[int] = []
        self.batch_sizes: list[int] = []
        self.probes: list[bool] = []
        self.seconds: list[float] = []
        # Of them, those that switching and catching up took.
        self.change_seconds: list[float] = []
        self.off_seconds: list[float] = []

    def set_situation(self, situation: Situation) -> None:
        """Notes what is true of the next step."""
        self._situation = situation

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """The policy's choice, and what it is worth."""
        choice = self._policy.choose(batch_size, now)
        situation, arm = self._situation, choice.arm
        assert situation is not None
        price = self._surface.step_seconds(batch_size, situation.kv_tokens)
        seconds = float(price[arm])
        if self._gammas[arm] == 0 and not choice.asleep:
            seconds *= self._options.warm_factor
        change = 0.0
        if self._gammas[arm] > 0:
            change += situation.catch_up_seconds[self._drafter_of[arm]]
        if self.arms and self.arms[-1] != arm:
            change += self._options.switch_seconds
        running = np.array(situation.running)
        accepted = float(running @ self._expected[:, arm]) * situation.accepted_share
        self.off_seconds.append(float(price[self._off_arm]) * (1 + accepted / batch_size))
        self.seconds.append(seconds + change)
        self.change_seconds.append(change)
        self.arms.append(arm)
        self.batch_sizes.append(batch_size)
        self.probes.append(choice.probe_id != 0)
        return choice

    def observe(self, record: StepRecord, now: float) -> None:
        """Tells the policy."""
        self._policy.observe(record, now)


@dataclass(frozen=True)
class AgainstOff:
    """worst: lowest ratio of any `WINDOW` steps in a row, which begin at step `begins`.

    overall: ratio of the run.  In the worst window: plain, probes: shares of its steps at gamma = 0
    and of probes; change: share of its time that switching and catching up took.
    """

    worst: float
    begins: int
    overall: float
    steps: int
    plain: float
    probes: float
    change: float


def against_off(
    scenario: Scenario,
    policy: Policy | None = None,
    seed: int = 0,
    window: int = WINDOW,
    *,
    by_request: bool = False,
) -> AgainstOff | None:
    """Runs the scenario, by default with the production core; None if it has too few steps.

    by_request: every request is worth its own mean instead of its kind's.
    """
    workload, surface, options = scenario.workload(seed), scenario.surface, scenario.options
    if by_request:
        workload = _kind_per_request(workload)
    expected = Truth(workload, surface).expected_by_kind()
    watched = WatchedPolicy(policy or make_controller(scenario), surface, options, expected)
    simulate(workload, surface, watched, options, seed)
    steps = len(watched.arms)
    if steps < window:
        return None
    off_seconds, run_seconds = (
        np.concatenate(([0.0], np.cumsum(part))) for part in (watched.off_seconds, watched.seconds)
    )
    ratios = (off_seconds[window:] - off_seconds[:-window]) / (
        run_seconds[window:] - run_seconds[:-window]
    )
    begins = int(ratios.argmin())
    worst_window = slice(begins, begins + window)
    return AgainstOff(
        float(ratios[begins]),
        begins,
        float(off_seconds[-1] / run_seconds[-1]),
        steps,
        sum(surface.arms[arm].gamma == 0 for arm in watched.arms[worst_window]) / window,
        sum(watched.probes[worst_window]) / window,
        sum(watched.change_seconds[worst_window]) / sum(watched.seconds[worst_window]),
    )


def _kind_per_request(workload: Workload) -> Workload:
    """The same workload, in which every request is of a kind of its own."""
    pools: dict[int, RequestPool] = {}

    def separate(pool: RequestPool) -> RequestPool:
        if id(pool) not in pools:
            pools[id(pool)] = replace(pool, kinds=np.arange(pool.requests))
        return pools[id(pool)]

    if isinstance(workload, ClosedLoop):
        phases = (replace(phase, pool=separate(phase.pool)) for phase in workload.phases)
        return ClosedLoop(tuple(phases))
    return replace(workload, pool=separate(workload.pool))
