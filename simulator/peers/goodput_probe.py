"""Probe once, then the best: the rule of the goodput prototype, as its code runs.

Restated from spec-goodput-control (KookiesNKareem, 2026), the controller that is kept per batch
bin with switching off allowed: start at gamma = 1, run every other draft length for one window of
24 steps (0 last), then after every window take the shortest draft length whose averaged
tokens/second (weight 0.35 a step) lies within 3 % of the best one.  What is not running keeps the
average of its only window: nothing is tried twice unless the running one falls below it.

Batch bins end at 1, 2, 4, 8, 16, 24, 32, 48, 64 and infinity.  It knows no costs, no acceptance,
and the first drafter only.  Left out: the variant that decides per request.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.core.engine_spec import Arm
from simulator.peers.common import accepted_tokens, by_gamma, first_drafter, nearest
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

WINDOW_STEPS = 24
MARGIN = 0.03
EWMA_WEIGHT = 0.35
INITIAL_GAMMA = 1
_BIN_ENDS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@dataclass(slots=True)
class _Bin:
    """Keeps one bin.

    running: the arm.  to_probe: arms left to try.  rates: arm -> averaged tokens/second.
    """

    running: int
    to_probe: list[int]
    rates: dict[int, float] = field(default_factory=dict)
    steps: int = 0


class GoodputProbe:
    """One window of each of the first drafter's draft lengths, then the best, per batch bin."""

    origin = PolicyOrigin.RESTATED

    def __init__(self, arms: Sequence[Arm], *, window_steps: int = WINDOW_STEPS) -> None:
        index = by_gamma(arms, first_drafter(arms))
        self._ascending = list(index.values())
        self._choices = {arm: ArmChoice(arm) for arm in self._ascending}
        first = nearest(list(index), INITIAL_GAMMA)
        others = sorted(index.keys() - {first}, key=lambda gamma: (gamma == 0, gamma))
        self._window_steps = window_steps
        self._bins = defaultdict[int, _Bin](
            lambda: _Bin(index[first], [index[gamma] for gamma in others])
        )

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """Returns what the bin runs."""
        del now
        return self._choices[self._bins[bisect_left(_BIN_ENDS, batch_size)].running]

    def observe(self, record: StepRecord, now: float) -> None:
        """Averages the step's tokens/second; every window ends in a decision."""
        del now
        found = self._bins[bisect_left(_BIN_ENDS, record.batch_size)]
        rate = (record.batch_size + accepted_tokens(record.counts)) / record.step_seconds
        before = found.rates.get(record.arm)
        found.rates[record.arm] = rate if before is None else before + EWMA_WEIGHT * (rate - before)
        found.steps += 1
        if found.steps >= self._window_steps:
            found.steps = 0
            if found.to_probe:
                found.running = found.to_probe.pop(0)
                return
            enough = max(found.rates.values()) / (1 + MARGIN)
            found.running = next(a for a in self._ascending if found.rates.get(a, 0.0) >= enough)
