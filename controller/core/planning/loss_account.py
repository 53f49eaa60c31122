"""Limits the loss against plain decoding to an allowance, whatever the estimates say.

    debt <- max(0, debt + loss - debt_allowance_per_step)     after every step, in plain steps
    loss = (C_arm / C_off - (1 + E_arm)) + (seconds of wake-up and switch) / C_off

A plain step is one at gamma = 0 at the same batch and context.  E_arm is the estimate after the
step, minus a standard deviation while there is little evidence.  The debt is the maximum, over all
stretches of steps that end now, of the loss beyond the allowance (a CUSUM, Page 1954), so gains
before the stretch do not offset it.  As long as no step raises the debt above `debt_max_steps`,
no n steps lose more than debt_max_steps + n * debt_allowance_per_step.

Every choice that costs something before it can pay is limited by `loss_budget_steps`: probes, and
waking a drafter.  With half of the possible debt used, gamma = 0 needs no margin over another arm.

Three things are allowed beyond it.  Drafters may be exchanged for half of what drafting has gained
recently.  Probes from gamma = 0 may cost a tenth of that gain if better traffic returns often.  A
wake-up that costs more than `loss_budget_steps` is allowed at once if a cautious estimate predicts
that drafting soon pays for it, and otherwise after enough steps that its cost is a small share of
them.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.engine_spec import Arm
from controller.core.planning.constraints import RowConstraints
from controller.core.planning.planner import LossLimits, Values
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings


@recorded(
    "loss_account",
    "_pending",
    debt="debt_steps",
    gained="_gained_steps",
    limit="_debt_limit_steps",
    since_waking="_steps_since_wake_up",
)
class LossAccount:
    """Holds the debt of one engine."""

    def __init__(self, arms: Sequence[Arm], settings: PlannerSettings) -> None:
        self._arms = tuple(arms)
        self._settings = settings
        self._off_arms = [i for i, arm in enumerate(arms) if arm.gamma == 0]
        self._is_drafting = [arm.gamma > 0 for arm in arms]
        self.debt_steps = 0.0
        self._steps_since_wake_up = 0.0
        # The plain steps that drafting has gained recently.
        self._gained_steps = 0.0
        self._debt_limit_steps = self._settings.debt_max_steps
        # By arm and batch size since the last decision: steps, and seconds beyond plain ones.
        self._pending: dict[tuple[int, int], tuple[int, float]] = {}

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the debt."""
        self._settings = settings

    @property
    def loss_budget_steps(self) -> float:
        """Returns the plain steps that may be lost now."""
        return max(0.0, self._debt_limit_steps - self.debt_steps)

    @property
    def first_run_budget_steps(self) -> float:
        """Returns the same for an arm's first run, whose estimated cost may be very wrong."""
        return (
            max(2 * self._settings.debt_max_steps, self.loss_budget_steps)
            if self.debt_steps < self._settings.debt_max_steps / 4
            else self.loss_budget_steps
        )

    def limits(self, values: Values) -> LossLimits:
        """Returns the limits on the loss of the next choice."""
        budget_steps = max(
            self.loss_budget_steps,
            self._settings.wake_up_share * self._steps_since_wake_up - self.debt_steps,
        )
        wake_up_steps: float | NDArray[np.float64] = (
            budget_steps + self._settings.exchange_gain_share * self._gained_steps
        )
        if self._off_arms and values.has_wake_up_cost:
            max_wake_up_seconds = wake_up_steps * values.plain_seconds
            wake_up_seconds = values.catch_up_seconds + values.switch_seconds
            if np.count_nonzero(wake_up_seconds > max_wake_up_seconds):
                # The gains matter only if a wake-up costs more than may be lost anyway.
                wake_up_steps = np.maximum(
                    wake_up_steps,
                    self._settings.wake_up_payback_steps * self._pessimistic_gains(values),
                )
        return LossLimits(wake_up_steps, self.debt_steps > self._debt_limit_steps / 2)

    def _pessimistic_gains(self, values: Values) -> NDArray[np.float64]:
        """Returns [arms, rows], the plain steps that a step gains by a cautious estimate."""
        tokens = (1 + values.expected_accepted) * self._caution_factors(values)[:, None]
        gains: NDArray[np.float64] = tokens - values.costs.seconds / values.plain_seconds
        return gains

    def observe(self, arm: int, batch_size: int, extra_seconds: float) -> None:
        """Adds a step.  arm: by index.  extra_seconds: its wake-up and switch overhead."""
        steps, seconds = self._pending.get((arm, batch_size), (0, 0.0))
        self._pending[arm, batch_size] = steps + 1, seconds + extra_seconds

    def commit(
        self, values: Values, constraints: RowConstraints, hazard: ShiftProbabilities
    ) -> None:
        """Charges the steps since the last decision by the present estimates.

        Steps are charged only where gamma = 0 was allowed.
        """
        seconds, expected = values.costs.seconds.item, values.expected_accepted.item
        factors: list[float] = []
        for (arm, size), (steps, extra_seconds) in self._pending.items():
            row = constraints.row_of(size)
            off_arms = [
                i
                for i in self._off_arms
                if constraints.feasible is None or constraints.feasible[i, row]
            ]
            if not off_arms:
                continue
            plain_seconds = min([seconds(i, row) for i in off_arms])
            loss_steps = extra_seconds / plain_seconds
            if loss_steps > self._settings.debt_max_steps:
                self._steps_since_wake_up = 0.0
            if self._is_drafting[arm]:
                tokens = 1 + expected(arm, row)
                if self._is_doubtful(values, arm):
                    factors = factors or self._caution_factors(values).tolist()
                    tokens *= factors[arm]
                loss_steps += steps * (seconds(arm, row) / plain_seconds - tokens)
            self._steps_since_wake_up += steps
            decayed_gain = self._gained_steps * math.exp(-steps / self._settings.gain_memory_steps)
            self._gained_steps = max(0.0, decayed_gain - loss_steps)
            self.debt_steps = min(
                max(
                    0.0,
                    self.debt_steps + loss_steps - steps * self._settings.debt_allowance_per_step,
                ),
                2 * self._debt_limit_steps,
            )
        self._pending.clear()
        return_probability = 1 - math.exp(-hazard.better_shift * self._settings.gain_memory_steps)
        self._debt_limit_steps = (
            self._settings.debt_max_steps
            + self._settings.return_gain_share * return_probability * self._gained_steps
        )

    def _is_doubtful(self, values: Values, arm: int) -> bool:
        curve = values.traffic.last_batch.get(self._arms[arm].drafter)
        return curve is not None and curve.exposures[0] <= self._settings.trusted_exposures

    def _caution_factors(self, values: Values) -> NDArray[np.float64]:
        """Returns [arms], factors of caution on the expected tokens."""
        log_variance = values.acceptance_uncertainty.variances(self._off_arms[:1])[:, 0]
        factors: NDArray[np.float64] = np.exp(-np.sqrt(log_variance))
        return factors
