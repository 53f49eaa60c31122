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

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# The conditional acceptance of better traffic: that of a drafter that fits its traffic.
_OPTIMISTIC_ACCEPTANCE = 0.8
# Drafts that one probe should find accepted if the traffic is better.
_PROBE_ACCEPTED_TOKENS = 4.0
_INTERVAL_MIN_STEPS = 4.0
# Maximum budget, in multiples of `probe_share`, where probes have found better traffic.
_FOUND_FACTOR_MAX = 6.0
# Share of the steps that probes may take, however cheap, until they have found better traffic or
# traffic shifts more often than every `_BUSY_STEPS`.
_PROBE_STEP_SHARE = 0.015
_COST_MIN_STEPS = 0.01
# Traffic that shifts at least once in this many steps gets the whole budget; traffic without shifts
# gets this share of it.
_BUSY_STEPS = 1000.0
_CALM_BUDGET_SHARE = 0.35
# A request ends after about this many plain steps, and then needs no catch-up.
_MISSED_STEPS_MAX = 200.0


@recorded(
    "observation_cost",
    arm="probe_arms",
    steps="probe_steps",
    interval="interval_steps",
    loss="loss_share",
    share="budget_share",
)
@dataclass(frozen=True, slots=True)
class ObservationCost:
    """Describes the probes from gamma = 0 for each bucket: arms, steps, interval and cost.

    probe_arms, probe_steps: [drafters, buckets] of int, the cheapest arm of each drafter; drafters
    take turns, since one may accept traffic that another does not.  interval_steps: [buckets]
    steps; inf where even better traffic would not pay.  loss_share: [buckets], share of every step,
    including the probes. budget_share: [buckets], share of step time that probes may cost.
    """

    probe_arms: NDArray[np.int64]
    probe_steps: NDArray[np.int64]
    interval_steps: NDArray[np.float64]
    loss_share: NDArray[np.float64]
    budget_share: NDArray[np.float64]


def probing_share(settings: PlannerSettings, shift_probability: float) -> float:
    """Returns the share of step time for probing: all of `probe_share` if traffic shifts often.

    If traffic has not shifted for long, probes find less and the share is smaller, by the square
    root, as for the best interval.

    shift_probability: the probability of any shift in one step.
    """
    return settings.probe_share * min(
        1.0, max(_CALM_BUDGET_SHARE, math.sqrt(_BUSY_STEPS * shift_probability))
    )


def optimistic_tokens(gamma: int) -> float:
    """Returns the tokens per step and sequence in traffic that fits the drafter."""
    return (1 - _OPTIMISTIC_ACCEPTANCE ** (gamma + 1)) / (1 - _OPTIMISTIC_ACCEPTANCE)


class ObservationPricer:
    """Computes `ObservationCost` from values.  One object per engine; it has no mutable state."""

    def __init__(
        self, arms: Sequence[Arm], sizes: NDArray[np.float64], settings: PlannerSettings
    ) -> None:
        self._off_arm = next((i for i, arm in enumerate(arms) if arm.gamma == 0), None)
        self._drafting_arms = np.flatnonzero([arm.gamma > 0 for arm in arms])
        optimistic = np.array([[optimistic_tokens(arm.gamma)] for arm in arms])
        # [arms that draft, 1]
        self._optimistic_tokens = optimistic[self._drafting_arms]
        needed_steps = np.ceil(_PROBE_ACCEPTED_TOKENS / np.maximum((optimistic - 1) * sizes, 1e-9))
        names = dict.fromkeys(arm.drafter for arm in arms if arm.gamma)
        # [drafters, arms]: the arms that are not drafting arms of each drafter.
        self._is_excluded = np.array(
            [[arm.drafter != name or arm.gamma == 0 for arm in arms] for name in names]
        )
        self._probe_steps = np.clip(needed_steps, 1, settings.probe_steps_max).astype(np.int64)
        self._sizes = sizes
        self._settings = settings

    def price_observation(
        self,
        tokens_per_second: NDArray[np.float64],
        seconds: NDArray[np.float64],
        catch_up: CatchUpPrice,
        hazard: ShiftProbabilities,
    ) -> ObservationCost | None:
        """Prices the observation of gamma = 0; None if there is nothing to observe.

        tokens_per_second, seconds: [arms, buckets].
        """
        if self._off_arm is None or not len(self._drafting_arms):
            return None
        settings, plain_seconds = self._settings, seconds[self._off_arm]
        gain = (self._optimistic_tokens / seconds[self._drafting_arms]).max(
            axis=0
        ) * plain_seconds - 1
        loss = (
            np.maximum(1 - tokens_per_second / tokens_per_second[self._off_arm], 0.0)
            * seconds
            / plain_seconds
        )
        probe_price = np.where(self._is_excluded[:, :, None], np.inf, self._probe_steps * loss)
        probe_arms = probe_price.argmin(axis=1)
        probe_steps = self._probe_steps[probe_arms, np.arange(probe_arms.shape[1])]
        # Each drafter observes in turn.
        cost_steps = np.maximum(
            probe_price.min(axis=1).sum(axis=0) / len(probe_arms), _COST_MIN_STEPS
        )
        is_worthwhile = gain > settings.switch_margin
        gain = np.where(is_worthwhile, gain, 1.0)
        budget_share = probing_share(settings, hazard.any_shift)
        if budget_share == 0:
            # Without probes gamma = 0 is final and has no price.
            zeros = np.zeros(probe_arms.shape[1])
            return ObservationCost(probe_arms, probe_steps, zeros + np.inf, zeros, zeros)
        shift_rate = max(hazard.any_shift, hazard.unobserved_better_shift)
        found_factor = min(1 + hazard.unobserved_better_count, _FOUND_FACTOR_MAX)
        max_step_share = (
            _PROBE_STEP_SHARE * found_factor * max(1.0, math.sqrt(_BUSY_STEPS * hazard.any_shift))
        )
        min_interval = np.maximum(
            probe_steps.sum(axis=0) / len(probe_arms) / max_step_share, _INTERVAL_MIN_STEPS
        )
        best_interval = np.maximum(np.sqrt(2 * cost_steps / (gain * shift_rate)), min_interval)
        # Reading missed tokens takes its share of every step, however often probes run.
        catch_up_share = catch_up.seconds_per_token * self._sizes / plain_seconds
        # Probes that have repeatedly found better traffic may cost more than other probes.
        max_share = settings.probe_share * found_factor
        budget_share = max_share if hazard.unobserved_better_count else budget_share
        budget_shares = np.minimum(budget_share + catch_up_share, max_share)
        interval_steps = np.where(
            is_worthwhile,
            np.maximum(
                best_interval,
                (cost_steps + catch_up.cheapest_seconds / plain_seconds) / budget_shares,
            ),
            np.inf,
        )
        better_probability = max(hazard.better_shift, hazard.unobserved_better_shift)
        if better_probability == 0:
            # No shift to better traffic was ever missed.
            return ObservationCost(
                probe_arms,
                probe_steps,
                interval_steps,
                np.zeros(len(interval_steps)),
                budget_shares,
            )
        cost_steps = cost_steps + catch_up.fixed_seconds / plain_seconds
        # Missed tokens need not be read after their requests have ended.
        interval_if_few_missed = cost_steps / np.maximum(budget_shares - catch_up_share, 1e-9)
        interval_if_all_missed = (cost_steps + catch_up_share * _MISSED_STEPS_MAX) / budget_shares
        chosen_interval = np.maximum(
            best_interval, np.minimum(interval_if_few_missed, interval_if_all_missed)
        )
        unobserved_loss = (
            cost_steps / chosen_interval
            + np.minimum(catch_up_share, budget_shares)
            + gain * better_probability * chosen_interval / 2
        )
        loss_share = np.where(is_worthwhile, np.minimum(unobserved_loss, 0.9), 0.0)
        return ObservationCost(probe_arms, probe_steps, interval_steps, loss_share, budget_shares)
