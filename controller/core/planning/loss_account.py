"""Limits the loss against plain decoding to an allowance, whatever the estimates say.

    debt <- max(0, debt + loss - ALLOWANCE)     after every step, in plain steps
    loss = (C_arm / C_off - (1 + E_arm)) + (seconds of wake-up and switch) / C_off

A plain step is one at gamma = 0 at the same batch and context.  E_arm is the estimate after the
step, minus a standard deviation while there is little evidence.  The debt is the maximum, over all
stretches of steps that end now, of the loss beyond the allowance (a CUSUM, Page 1954), so gains
before the stretch do not offset it.  As long as no step raises the debt above DEBT_MAX, no n steps
lose more than DEBT_MAX + n * ALLOWANCE.

Every choice that costs something before it can pay is limited by `room`: probes, waking a drafter,
and drafting only because gamma = 0 observes nothing.

Three things are allowed beyond it.  Drafters may be exchanged for half of what drafting has gained
recently.  Probes from gamma = 0 may cost a tenth of that gain if better traffic returns often.  A
wake-up that costs more than the room is allowed at once if a cautious estimate predicts that
drafting soon pays for it, and otherwise after so many steps that it costs a small share of them.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import Hazard
from controller.core.engine_spec import Arm
from controller.core.planning.constraints import PlanRows
from controller.core.planning.doubt import AcceptanceDoubt
from controller.core.planning.planner import LossLimits, Values
from controller.core.recorded_state import recorded

# In plain steps.  Together 7.5 in 500 steps, which then yield 0.985 of plain decoding.  The margin
# to 0.98 is for losses that the estimates show too late.
DEBT_MAX = 4.0
ALLOWANCE = 0.007
# A wake-up that costs more than DEBT_MAX is allowed when this share of the steps since the last one
# covers its cost.
_WAKING_SHARE = 0.002
# It is allowed at once if the cautiously estimated gains of this many steps cover its cost.
_WAKING_STEPS = 50.0
# Drafters may be exchanged for this share of the gain of drafting over about this many steps.
_GAIN_SHARE = 0.5
_GAIN_STEPS = 250.0
# The same for probes, times the probability that better traffic returns within _GAIN_STEPS.
_RETURN_SHARE = 0.1
# Exposures of a drafter's first position above which its estimate is used without caution.
_SURE_EXPOSURES = 200.0


@recorded("loss_account", "debt _gained _limit _pending _since_waking")
class LossAccount:
    """Holds the debt of one engine."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = tuple(arms)
        self._off = [i for i, arm in enumerate(arms) if arm.gamma == 0]
        self._drafts = [arm.gamma > 0 for arm in arms]
        self.debt = 0.0
        self._since_waking = 0.0
        # The plain steps that drafting has gained recently.
        self._gained = 0.0
        self._limit = DEBT_MAX
        # By arm and batch size since the last decision: steps, and seconds beyond plain ones.
        self._pending: dict[tuple[int, int], tuple[int, float]] = {}

    @property
    def room(self) -> float:
        """Returns the plain steps that may be lost now."""
        return max(0.0, self._limit - self.debt)

    @property
    def room_for_news(self) -> float:
        """Returns the same for an arm's first run, whose estimated cost may be very wrong."""
        return max(2 * DEBT_MAX, self.room) if self.debt < DEBT_MAX / 4 else self.room

    def limits(self, values: Values) -> LossLimits:
        """Returns the limits on the loss of the next choice."""
        room = max(self.room, _WAKING_SHARE * self._since_waking - self.debt)
        waking: float | NDArray[np.float64] = room + _GAIN_SHARE * self._gained
        if self._off and values.catch_up.any():
            plain = values.costs.seconds[self._off].min(axis=0)
            price = values.catch_up + values.switch_seconds
            if np.count_nonzero(price > waking * plain):
                # The gains matter only if a wake-up costs more than may be lost anyway.
                waking = np.maximum(waking, _WAKING_STEPS * self._gains(values, plain))
        return LossLimits(waking, self.debt > self._limit / 2)

    def _gains(self, values: Values, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [arms, rows], the plain steps that a step gains by a cautious estimate.

        plain: [rows] seconds of a plain step.
        """
        tokens = (1 + values.expected) * self._cautions(values)[:, None]
        gains: NDArray[np.float64] = tokens - values.costs.seconds / plain
        return gains

    def observe(self, arm: int, batch_size: int, extra_seconds: float) -> None:
        """Adds a step.  arm: by index.  extra_seconds: its wake-up and switch overhead."""
        steps, seconds = self._pending.get((arm, batch_size), (0, 0.0))
        self._pending[arm, batch_size] = steps + 1, seconds + extra_seconds

    def settle(self, values: Values, at: PlanRows, hazard: Hazard) -> None:
        """Charges the steps since the last decision by the present estimates.

        Steps are charged only where gamma = 0 was allowed.
        """
        seconds, expected = values.costs.seconds.item, values.expected.item
        cautions: list[float] = []
        for (arm, size), (steps, extra) in self._pending.items():
            row = at.row_of(size)
            off = [i for i in self._off if at.feasible is None or at.feasible[i, row]]
            if not off:
                continue
            plain = min([seconds(i, row) for i in off])
            loss = extra / plain
            if loss > DEBT_MAX:
                self._since_waking = 0.0
            if self._drafts[arm]:
                tokens = 1 + expected(arm, row)
                if self._is_doubtful(values, arm):
                    cautions = cautions or self._cautions(values).tolist()
                    tokens *= cautions[arm]
                loss += steps * (seconds(arm, row) / plain - tokens)
            self._since_waking += steps
            kept = self._gained * math.exp(-steps / _GAIN_STEPS)
            self._gained = max(0.0, kept - loss)
            self.debt = min(max(0.0, self.debt + loss - steps * ALLOWANCE), 2 * self._limit)
        self._pending.clear()
        returns = 1 - math.exp(-hazard.better * _GAIN_STEPS)
        self._limit = DEBT_MAX + _RETURN_SHARE * returns * self._gained

    def _is_doubtful(self, values: Values, arm: int) -> bool:
        curve = values.traffic.batch.get(self._arms[arm].drafter)
        return curve is not None and curve.exposures[0] <= _SURE_EXPOSURES

    def _cautions(self, values: Values) -> NDArray[np.float64]:
        """Returns [arms], factors of caution on the expected tokens."""
        doubt = AcceptanceDoubt(values.traffic, self._arms).variance(self._off[0])
        factors: NDArray[np.float64] = np.exp(-np.sqrt(doubt))
        return factors
