"""Prices gamma = 0, where acceptance is not observed and better traffic goes unnoticed.

If the traffic shifts with probability h in a step, better traffic would gain g, and a probe costs c
steps, then probing every I steps loses c / I + g h I / 2 of every step.  The minimum is at
I = sqrt(2 c / (g h)); the exploration budget may allow fewer probes.  After shifts to better
traffic have been observed, the loss is a price on choosing gamma = 0: with traffic that changes
every hundred steps, a draft length of 1, which always observes, has more value than a slightly
faster gamma = 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import Hazard
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# The conditional acceptance of better traffic: that of a drafter that fits its traffic.
_HOPEFUL_ACCEPTANCE = 0.8
# Drafts that one probe should find accepted if the traffic is better.
_LOOK_ACCEPTED = 4.0
_INTERVAL_MIN = 4.0
# Maximum budget, in multiples of `probe_share`, where probes have found better traffic.
_FOUND_SHARES = 6.0
# Share of the steps that probes may take, however cheap, until they have found better traffic or
# traffic shifts more often than every `_BUSY_STEPS`.
_LOOK_STEPS = 0.015
_COST_MIN = 0.01
# Traffic that shifts at least once in this many steps gets the whole budget; traffic without shifts
# gets this share of it.
_BUSY_STEPS = 1000.0
_CALM_SHARE = 0.35
# A request ends after about this many plain steps, and then needs no catch-up.
_MISSED_STEPS_MAX = 200.0


@recorded("observation_cost")
@dataclass(frozen=True, slots=True)
class ObservationCost:
    """Describes the probes from gamma = 0 for each bucket: arms, steps, interval and cost.

    arm, steps: [drafters, buckets] of int, the cheapest arm of each drafter; drafters take turns,
    since one may accept traffic that another does not.  interval: [buckets] steps; inf where even
    better traffic would not pay.  loss: [buckets], share of every step, including the probes.
    share: [buckets], share of step time that probes may cost.
    """

    arm: NDArray[np.int64]
    steps: NDArray[np.int64]
    interval: NDArray[np.float64]
    loss: NDArray[np.float64]
    share: NDArray[np.float64]


def budget(settings: PlannerSettings, shift: float) -> float:
    """Returns the share of step time for probing: all of `probe_share` if traffic shifts often.

    If traffic has not shifted for long, probes find less and the share is smaller, by the square
    root, as for the best interval.

    shift: the probability of any shift in one step.
    """
    return settings.probe_share * min(1.0, max(_CALM_SHARE, math.sqrt(_BUSY_STEPS * shift)))


def hopeful_tokens(gamma: int) -> float:
    """Returns the tokens per step and sequence in traffic that fits the drafter."""
    return (1 - _HOPEFUL_ACCEPTANCE ** (gamma + 1)) / (1 - _HOPEFUL_ACCEPTANCE)


class ObservationPlanner:
    """Computes `ObservationCost` from values.  One object per engine; it has no mutable state."""

    def __init__(
        self, arms: Sequence[Arm], sizes: NDArray[np.float64], settings: PlannerSettings
    ) -> None:
        self._off = next((i for i, arm in enumerate(arms) if arm.gamma == 0), None)
        self._drafting = np.flatnonzero([arm.gamma > 0 for arm in arms])
        hopeful = np.array([[hopeful_tokens(arm.gamma)] for arm in arms])
        # [arms that draft, 1]
        self._hopeful = hopeful[self._drafting]
        wanted = np.ceil(_LOOK_ACCEPTED / np.maximum((hopeful - 1) * sizes, 1e-9))
        names = dict.fromkeys(arm.drafter for arm in arms if arm.gamma)
        # [drafters, arms]: the arms that are not drafting arms of each drafter.
        self._others = np.array(
            [[arm.drafter != name or arm.gamma == 0 for arm in arms] for name in names]
        )
        self._steps = np.clip(wanted, 1, settings.probe_steps_max).astype(np.int64)
        self._sizes = sizes
        self._settings = settings

    def observation(
        self,
        value: NDArray[np.float64],
        seconds: NDArray[np.float64],
        catch_up: CatchUpPrice,
        hazard: Hazard,
    ) -> ObservationCost | None:
        """Prices the observation of gamma = 0; None if there is nothing to observe.

        value, seconds: [arms, buckets].
        """
        if self._off is None or not len(self._drafting):
            return None
        settings, plain = self._settings, seconds[self._off]
        gain = (self._hopeful / seconds[self._drafting]).max(axis=0) * plain - 1
        loss = np.maximum(1 - value / value[self._off], 0.0) * seconds / plain
        price = np.where(self._others[:, :, None], np.inf, self._steps * loss)
        arm = price.argmin(axis=1)
        steps = self._steps[arm, np.arange(arm.shape[1])]
        # Each drafter observes in turn.
        cost = np.maximum(price.min(axis=1).sum(axis=0) / len(arm), _COST_MIN)
        worth = gain > settings.switch_margin
        gain = np.where(worth, gain, 1.0)
        share = budget(settings, hazard.expected)
        if share == 0:
            # Without probes gamma = 0 is final and has no price.
            nothing = np.zeros(arm.shape[1])
            return ObservationCost(arm, steps, nothing + np.inf, nothing, nothing)
        rate = max(hazard.expected, hazard.unseen)
        finds = min(1 + hazard.found, _FOUND_SHARES)
        often = _LOOK_STEPS * finds * max(1.0, math.sqrt(_BUSY_STEPS * hazard.expected))
        least = np.maximum(steps.sum(axis=0) / len(arm) / often, _INTERVAL_MIN)
        best = np.maximum(np.sqrt(2 * cost / (gain * rate)), least)
        # Reading missed tokens takes its share of every step, however often probes run.
        asleep = catch_up.per_token * self._sizes / plain
        # Probes that have repeatedly found better traffic may cost more than other probes.
        most = settings.probe_share * finds
        share = most if hazard.found else share
        shares = np.minimum(share + asleep, most)
        due = np.where(worth, np.maximum(best, (cost + catch_up.now / plain) / shares), np.inf)
        better = max(hazard.better, hazard.unseen)
        if better == 0:
            # No shift to better traffic was ever missed.
            return ObservationCost(arm, steps, due, np.zeros(len(due)), shares)
        cost = cost + catch_up.fixed / plain
        # Missed tokens need not be read after their requests have ended.
        short = cost / np.maximum(shares - asleep, 1e-9)
        rarely = (cost + asleep * _MISSED_STEPS_MAX) / shares
        apart = np.maximum(best, np.minimum(short, rarely))
        blind = cost / apart + np.minimum(asleep, shares) + gain * better * apart / 2
        priced = np.where(worth, np.minimum(blind, 0.9), 0.0)
        return ObservationCost(arm, steps, due, priced, shares)
