"""Implements two published rules, for comparison and for cautious operators (setting `policy`).

`tide` switches one fixed draft length on where TIDE's practical speedup (its Eq. 5, on the measured
costs) is above 1, and off elsewhere.  `sglang-ema` moves between a few draft lengths per batch slot
by a moving average of accepted drafts, as SGLang's adaptive mode does; it uses no costs.  Both make
the same kind of table, with the same leases, reasons and explanations.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import Hazard
from controller.core.engine_spec import Arm
from controller.core.planning.planner import NO_LIMITS, LossLimits, Planner, Values
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# SGLang's default table: smallest batch size of a slot, its draft lengths, margin on the way down.
_SLOTS = (
    (1, (1, 3, 5, 7), -0.25),
    (8, (0, 1, 3), 0.0),
    (32, (0, 1), 0.0),
    (64, (0,), 0.0),
)
_EMA_RATE = 0.2
_WARM_UP_STEPS = 10
_UPDATE_EVERY = 5


@recorded("tide_planner")
class TidePlanner(Planner):
    """Drafts where (1 - alpha^(gamma+1)) / ((1 - alpha) (c(b) gamma + beta(b))) > 1.

    c(b) gamma + beta(b) is the cost of a drafting step over that of a plain one, as in the cost
    table; the numerator is 1 + E[accepted | gamma].
    """

    is_cautious = False

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        super().__init__(arms, buckets, settings)
        first = [i for i, arm in enumerate(arms) if arm.drafter == arms[0].drafter]
        drafting = [i for i in first if arms[i].gamma] or first
        self._on_arm = min(drafting, key=lambda i: abs(arms[i].gamma - settings.tide_gamma))
        self._off_arm = next((i for i in first if arms[i].gamma == 0), self._on_arm)

    def update(
        self,
        values: Values,
        hazard: Hazard,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LIMITS,
    ) -> Sequence[int]:
        """Chooses one of the two arms for each bucket."""
        del discounts, limits
        self.observation = self._observation_planner.observation(
            values.value, values.costs.seconds, values.catch_up_price, hazard
        )
        cost = values.costs.seconds[self._on_arm] / values.costs.seconds[self._off_arm]
        speedup = (1 + values.expected[self._on_arm]) / cost
        return self._take([self._on_arm if s > 1 else self._off_arm for s in speedup], values)


@recorded("ema_slot", "_index _average _steps")
class _Slot:
    """Holds a batch slot: its ascending draft lengths and the moving average that picks one."""

    def __init__(self, gammas: Sequence[int], down: float) -> None:
        self.gammas = tuple(gammas)
        self._down = down
        self._index = min(range(len(gammas)), key=lambda i: abs(gammas[i] - 3))
        self._average = float(self.gamma - 1)
        self._steps = 0

    @property
    def gamma(self) -> int:
        """The draft length in use."""
        return self.gammas[self._index]

    def observe(self, mean_accepted: float, drafted: int) -> None:
        """Adds a step's mean accepted drafts; every few steps the draft length may change."""
        if drafted:
            self._average += _EMA_RATE * (mean_accepted - self._average)
        self._steps += 1
        if self._steps > _WARM_UP_STEPS and self._steps % _UPDATE_EVERY == 0:
            self._move()

    def _move(self) -> None:
        if self.gamma == 0:
            # At gamma = 0 nothing is observed: the next length is tried at every interval.
            if len(self.gammas) > 1:
                self._index = 1
                if self._average < 0:
                    # It started at gamma = 0 and has observed nothing yet.
                    self._average = self.gamma - 1.0
            return
        start = self._index
        while self._index > 0:
            below = self.gammas[self._index - 1]
            if self._average > (below - 0.5 if below else 0.5) + self._down:
                break
            self._index -= 1
        if self._index < start:
            return
        while self._index + 1 < len(self.gammas) and self._average > self.gamma - 0.5:
            self._index += 1


@recorded("ema_planner", "_slots")
class EmaPlanner(Planner):
    """Follows SGLang's rule: the moving average of accepted drafts picks the draft length."""

    explores = False
    is_cautious = False

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        super().__init__(arms, buckets, settings)
        self._index = {arm.gamma: i for i, arm in enumerate(arms) if arm.drafter == arms[0].drafter}
        self._slots = [
            (first, _Slot(self._nearest(gammas), down)) for first, gammas, down in _SLOTS
        ]

    def _nearest(self, wanted: Sequence[int]) -> list[int]:
        """Returns the engine's draft lengths that are closest to the table's."""
        return sorted({min(self._index, key=lambda g: (abs(g - w), g)) for w in wanted})

    def _slot(self, batch_size: int) -> _Slot:
        return next(slot for first, slot in reversed(self._slots) if batch_size >= first)

    def observe(self, report: StepReport) -> None:
        """Updates the slot of the report's batch size."""
        accepted = sum(k * count for k, count in enumerate(report.accepted_counts))
        self._slot(report.batch_size).observe(accepted / report.batch_size, report.gamma)

    def update(
        self,
        values: Values,
        hazard: Hazard,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LIMITS,
    ) -> Sequence[int]:
        """Chooses the slots' draft lengths; values matter only where these may not run."""
        del hazard, discounts, limits
        wanted = [self._index[self._slot(size).gamma] for size in self.buckets]
        return self._take(wanted, values)


def make_planner(arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings) -> Planner:
    """Makes the planner that `settings.policy` names."""
    kinds = {"goodput": Planner, "tide": TidePlanner, "sglang-ema": EmaPlanner}
    return kinds[settings.policy](arms, buckets, settings)
