"""Implements two published rules, for comparison and for cautious operators (setting `policy`).

`tide` switches one fixed draft length on where TIDE's practical speedup (its Eq. 5, on the measured
costs) is above 1, and off elsewhere.  `sglang-ema` moves between a few draft lengths per batch slot
by a moving average of accepted drafts, as SGLang's adaptive mode does; it uses no costs.  Both make
the same kind of table, with the same leases, reasons and explanations.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm
from controller.core.planning.planner import NO_LOSS_LIMITS, LossLimits, Planner, Values
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# SGLang's default table: smallest batch size of a slot, its draft lengths, margin on the way down.
_SLOT_TABLE = (
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

    uses_discounts = False

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        super().__init__(arms, buckets, settings)
        first_drafter_arms = [i for i, arm in enumerate(arms) if arm.drafter == arms[0].drafter]
        drafting_arms = [i for i in first_drafter_arms if arms[i].gamma] or first_drafter_arms
        self._on_arm = min(drafting_arms, key=lambda i: abs(arms[i].gamma - settings.tide_gamma))
        self._off_arm = next((i for i in first_drafter_arms if arms[i].gamma == 0), self._on_arm)

    def update(
        self,
        values: Values,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LOSS_LIMITS,
    ) -> Sequence[int]:
        """Chooses one of the two arms for each bucket."""
        del discounts, limits
        cost_ratio = values.costs.seconds[self._on_arm] / values.costs.seconds[self._off_arm]
        speedup = (1 + values.expected_accepted[self._on_arm]) / cost_ratio
        return self._apply_choice(
            [self._on_arm if s > 1 else self._off_arm for s in speedup], values
        )


@recorded("ema_slot", "_index _steps", average="_mean_accepted")
class _EmaSlot:
    """Holds a batch slot: its ascending draft lengths and the moving average that picks one."""

    def __init__(self, gammas: Sequence[int], down_margin: float) -> None:
        self.gammas = tuple(gammas)
        self._down_margin = down_margin
        self._index = min(range(len(gammas)), key=lambda i: abs(gammas[i] - 3))
        self._mean_accepted = float(self.gamma - 1)
        self._steps = 0

    @property
    def gamma(self) -> int:
        """The draft length in use."""
        return self.gammas[self._index]

    def observe(self, mean_accepted: float, step_gamma: int) -> None:
        """Adds a step's mean accepted drafts; every few steps the draft length may change."""
        if step_gamma:
            self._mean_accepted += _EMA_RATE * (mean_accepted - self._mean_accepted)
        self._steps += 1
        if self._steps > _WARM_UP_STEPS and self._steps % _UPDATE_EVERY == 0:
            self._adjust_gamma()

    def _adjust_gamma(self) -> None:
        if self.gamma == 0:
            # At gamma = 0 nothing is observed: the next length is tried at every interval.
            if len(self.gammas) > 1:
                self._index = 1
                if self._mean_accepted < 0:
                    # It started at gamma = 0 and has observed nothing yet.
                    self._mean_accepted = self.gamma - 1.0
            return
        start_index = self._index
        while self._index > 0:
            shorter_gamma = self.gammas[self._index - 1]
            if (
                self._mean_accepted
                > (shorter_gamma - 0.5 if shorter_gamma else 0.5) + self._down_margin
            ):
                break
            self._index -= 1
        if self._index < start_index:
            return
        while self._index + 1 < len(self.gammas) and self._mean_accepted > self.gamma - 0.5:
            self._index += 1


@recorded("ema_planner", "_slots")
class EmaPlanner(Planner):
    """Follows SGLang's rule: the moving average of accepted drafts picks the draft length."""

    can_explore = False
    uses_discounts = False

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        super().__init__(arms, buckets, settings)
        self._arm_by_gamma = {
            arm.gamma: i for i, arm in enumerate(arms) if arm.drafter == arms[0].drafter
        }
        self._slots = [
            (first, _EmaSlot(self._nearest_gammas(gammas), down))
            for first, gammas, down in _SLOT_TABLE
        ]

    def _nearest_gammas(self, table_gammas: Sequence[int]) -> list[int]:
        """Returns the engine's draft lengths that are closest to the table's."""
        return sorted(
            {min(self._arm_by_gamma, key=lambda g: (abs(g - w), g)) for w in table_gammas}
        )

    def _slot_for_batch(self, batch_size: int) -> _EmaSlot:
        return next(slot for first, slot in reversed(self._slots) if batch_size >= first)

    def observe(self, report: StepReport) -> None:
        """Updates the slot of the report's batch size."""
        self._slot_for_batch(report.batch_size).observe(
            report.accepted_tokens / report.batch_size, report.gamma
        )

    def update(
        self,
        values: Values,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LOSS_LIMITS,
    ) -> Sequence[int]:
        """Chooses the slots' draft lengths; values matter only where these may not run."""
        del discounts, limits
        slot_choice = [
            self._arm_by_gamma[self._slot_for_batch(size).gamma] for size in self.buckets
        ]
        return self._apply_choice(slot_choice, values)


def make_planner(arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings) -> Planner:
    """Makes the planner that `settings.policy` names."""
    kinds = {"goodput": Planner, "tide": TidePlanner, "sglang-ema": EmaPlanner}
    return kinds[settings.policy](arms, buckets, settings)
