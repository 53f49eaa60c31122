"""Schedules probes from gamma = 0, where acceptance is not observed and better traffic unnoticed.

If the traffic shifts with probability h in a step, better traffic would gain g, and a probe costs c
steps, then probing every I steps loses c / I + g h I / 2 of every step.  The minimum is at
I = sqrt(2 c / (g h)); the exploration budget may allow fewer probes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class ObservationSchedule:
    """Describes the probes from gamma = 0 at one batch size.

    probes: of each drafter its cheapest arm, by index, and the steps of a probe; drafters take
    turns, since one may accept traffic that another does not.  interval_steps: steps between two
    probes; inf where even better traffic would not pay.  budget_share: share of step time that
    probes may cost.
    """

    probes: tuple[tuple[int, int], ...]
    interval_steps: float
    budget_share: float


def probing_share(settings: PlannerSettings, shift_probability: float) -> float:
    """Returns the share of step time for probing: all of `probe_share` if traffic shifts often.

    If traffic has not shifted for long, probes find less and the share is smaller, by the square
    root, as for the best interval.

    shift_probability: the probability of any shift in one step.
    """
    return settings.probe_share * min(
        1.0, max(settings.calm_budget_share, math.sqrt(settings.busy_steps * shift_probability))
    )


def optimistic_tokens(gamma: int, settings: PlannerSettings) -> float:
    """Returns the tokens per step and sequence in traffic that fits the drafter."""
    acceptance = settings.optimistic_acceptance
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


class ObservationScheduler:
    """Computes `ObservationSchedule` from values.  It has no mutable state."""

    def __init__(self, arms: Sequence[Arm], settings: PlannerSettings) -> None:
        self._settings = settings
        self._off_arm = next((i for i, arm in enumerate(arms) if arm.gamma == 0), None)
        self._optimistic_tokens = [optimistic_tokens(arm.gamma, settings) for arm in arms]
        names = dict.fromkeys(arm.drafter for arm in arms if arm.gamma)
        self._arms_by_drafter = [
            [i for i, arm in enumerate(arms) if arm.drafter == name and arm.gamma] for name in names
        ]

    def schedule(
        self,
        tokens_per_second: Sequence[float],
        seconds: Sequence[float],
        batch_size: float,
        catch_up: CatchUpPrice,
        hazard: ShiftProbabilities,
        feasible: Sequence[bool] | None = None,
    ) -> ObservationSchedule | None:
        """Returns the schedule of a row; None if there is nothing to observe.

        tokens_per_second, seconds: [arms] of the row.  batch_size: the row's.  feasible: [arms]
        that may be probed, None: all.
        """
        settings, off_arm = self._settings, self._off_arm
        budget_share = probing_share(settings, hazard.any_shift)
        if off_arm is None or budget_share == 0:
            return None
        plain_seconds, plain_value = seconds[off_arm], tokens_per_second[off_arm]
        probes, cost_steps, best_relative_value = [], 0.0, 0.0
        for drafter_arms in self._arms_by_drafter:
            prices = []
            for arm in drafter_arms:
                if feasible is None or feasible[arm]:
                    steps = self._probe_steps(arm, batch_size)
                    loss = max(1 - tokens_per_second[arm] / plain_value, 0.0)
                    prices.append((steps * loss * seconds[arm] / plain_seconds, arm, steps))
                    best_relative_value = max(
                        best_relative_value, self._optimistic_tokens[arm] / seconds[arm]
                    )
            if prices:
                price, arm, steps = min(prices)
                probes.append((arm, steps))
                cost_steps += price
        if not probes:
            return None
        gain = best_relative_value * plain_seconds - 1
        # Each drafter observes in turn.
        cost_steps = max(cost_steps / len(probes), settings.look_cost_min_steps)
        found_factor = min(1 + hazard.unobserved_better_count, settings.look_found_factor_max)
        # Probes that have repeatedly found better traffic may cost more than other probes.
        max_share = settings.probe_share * found_factor
        if hazard.unobserved_better_count:
            budget_share = max_share
        # Reading missed tokens takes its share of every step, however often probes run.
        catch_up_share = catch_up.seconds_per_token * batch_size / plain_seconds
        budget_share = min(budget_share + catch_up_share, max_share)
        if gain <= settings.switch_margin:
            return ObservationSchedule(tuple(probes), math.inf, budget_share)
        max_step_share = (
            settings.look_step_share
            * found_factor
            * max(1.0, math.sqrt(settings.busy_steps * hazard.any_shift))
        )
        mean_steps = sum([steps for _, steps in probes]) / len(probes)
        shift_rate = max(hazard.any_shift, hazard.unobserved_better_shift)
        interval_steps = max(
            math.sqrt(2 * cost_steps / (gain * shift_rate)),
            mean_steps / max_step_share,
            settings.look_interval_min_steps,
            (cost_steps + catch_up.cheapest_seconds / plain_seconds) / budget_share,
        )
        return ObservationSchedule(tuple(probes), interval_steps, budget_share)

    def _probe_steps(self, arm: int, batch_size: float) -> int:
        """Returns the steps in which an arm should find enough accepted drafts."""
        accepted_tokens = (self._optimistic_tokens[arm] - 1) * batch_size
        steps = math.ceil(self._settings.look_accepted_tokens / accepted_tokens)
        return max(1, min(steps, self._settings.probe_steps_max))
