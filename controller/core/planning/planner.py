"""Chooses an arm for each batch size: argmax of tokens per second, with hysteresis.

    V(d, gamma, B) = B * (1 + E_d[accepted | gamma]) / C(d, B, gamma, kv)

gamma = 0 is an arm like any other (E = 0).  The choice changes only if another arm's value is
higher by `switch_margin`, so that noise near a break-even point does not cause switching, and if
the gain pays back the cost of the change (an idle drafter has to catch up) within
`payback_seconds`.  A bound on the time per output token excludes the arms that exceed it
(`token_time`).  A drafter is woken only within the allowed loss against gamma = 0 (`loss_account`);
until then the best arm that needs no wake-up runs.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.acceptance.uncertainty import AcceptanceUncertainty
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.plan import Reason
from controller.core.planning.token_time import RowBounds, TokenTimeBound, apply_bounds
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Factor on the value of an arm that may not run.
_EXCLUDED_FACTOR = 1e-12


@dataclass(frozen=True)
class Values:
    """Holds all inputs of the choice.

    arms: of the engine.  traffic: the acceptance curves.  expected_accepted: [arms, buckets],
    expected accepted draft tokens. catch_up_seconds: [arms, buckets], seconds that the arm's
    drafter first needs to catch up. switch_seconds: cost of any change of arm.  costs: of a step,
    by arm and bucket.
    catch_up_price: see `CatchUpPrice`.  tokens_per_second: [arms, buckets], of the whole batch.
    """

    arms: Sequence[Arm]
    traffic: TrafficCurves
    expected_accepted: NDArray[np.float64]
    costs: Costs
    catch_up_seconds: NDArray[np.float64]
    catch_up_price: CatchUpPrice
    tokens_per_second: NDArray[np.float64]
    switch_seconds: float = 0.0

    @cached_property
    def acceptance_uncertainty(self) -> AcceptanceUncertainty:
        """Returns how uncertain the expected tokens are; computed when it is first needed."""
        return AcceptanceUncertainty(self.traffic, self.arms)

    @cached_property
    def has_wake_up_cost(self) -> bool:
        """Whether any drafter has to catch up before it can draft."""
        return bool(np.count_nonzero(self.catch_up_seconds))

    @cached_property
    def plain_seconds(self) -> NDArray[np.float64]:
        """Returns [rows], the seconds of a step at gamma = 0, by the cheapest arm."""
        off_arms = [i for i, arm in enumerate(self.arms) if arm.gamma == 0]
        seconds: NDArray[np.float64] = self.costs.seconds[off_arms].min(axis=0)
        return seconds

    @property
    def tpot_seconds(self) -> NDArray[np.float64]:
        """Returns [arms, buckets], the expected seconds between a sequence's output tokens."""
        return self.costs.seconds / (1 + self.expected_accepted)


def evaluate_arms(
    arms: Sequence[Arm],
    sizes: NDArray[np.float64],
    traffic: TrafficCurves,
    costs: Costs,
    catch_up_by_drafter: Mapping[str, NDArray[np.float64]],
    catch_up_price: CatchUpPrice,
    switch_seconds: float = 0.0,
) -> Values:
    """Computes the values of all arms at all buckets.

    catch_up_by_drafter: [buckets] seconds of each drafter that has missed tokens.
    """
    expected_accepted = traffic.expected_accepted(arms, sizes)
    catch_up_seconds = np.zeros(expected_accepted.shape)
    if catch_up_by_drafter:
        for i, arm in enumerate(arms):
            if arm.gamma and arm.drafter in catch_up_by_drafter:
                catch_up_seconds[i] = catch_up_by_drafter[arm.drafter]
    return Values(
        arms,
        traffic,
        expected_accepted,
        costs,
        catch_up_seconds,
        catch_up_price,
        (1 + expected_accepted) * sizes / costs.seconds,
        switch_seconds,
    )


def _mask_excluded(
    is_allowed: NDArray[np.bool_] | None, value: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the values, [arms, rows], almost 0 for forbidden arms.  is_allowed: None for all."""
    return value if is_allowed is None else np.where(is_allowed, value, value * _EXCLUDED_FACTOR)


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Limits the loss against plain decoding now, see `loss_account`.

    wake_up_steps: plain steps that waking a drafter may cost, [arms, rows] or one for all.
    prefers_off: whether gamma = 0 needs no margin over another arm.
    """

    wake_up_steps: float | NDArray[np.float64] = math.inf
    prefers_off: bool = False


NO_LOSS_LIMITS = LossLimits()


@recorded("planner", "choice proven reasons switches", removed="observation")
class Planner:
    """Holds the present choice per bucket, which only `update` changes."""

    can_explore = True
    # Whether `update` uses discounts.
    uses_discounts = True

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        self.arms = tuple(arms)
        self.buckets = tuple(buckets)
        self._settings = settings
        self._is_off = np.array([arm.gamma == 0 for arm in arms])
        self._off_arms = {i for i, arm in enumerate(arms) if arm.gamma == 0}
        self._allowed_arms: NDArray[np.bool_] | None = None
        self._runnable_arms: NDArray[np.bool_] | None = None
        self._bounds: RowBounds | None = None
        # In the present update: by row, the arm that is not chosen only because of a bound.
        self._excluded_arms: dict[int, int] = {}
        self.choice: list[int] | None = None
        # The newest choice of each bucket that has run; None where none has.
        self.proven: list[int | None] = [None] * len(buckets)
        self.reasons: list[Reason] = [Reason.EXPLOIT] * len(buckets)
        self.switches = 0

    def set_rows(
        self,
        buckets: Sequence[int],
        feasible: NDArray[np.bool_] | None,
        possible: NDArray[np.bool_] | None = None,
        bounds: Sequence[TokenTimeBound | None] = (),
    ) -> None:
        """Replaces the rows, and sets which arms may run in them.

        buckets: upper ends, ascending.  possible, feasible, bounds: as in `RowConstraints`.
        """
        if self.choice is not None:
            previous_rows = [
                min(bisect_left(self.buckets, b), len(self.buckets) - 1) for b in buckets
            ]
            self.choice = [self.choice[j] for j in previous_rows]
            self.proven = [self.proven[j] for j in previous_rows]
        else:
            self.proven = [None] * len(buckets)
        self.buckets = tuple(buckets)
        self.reasons = [Reason.EXPLOIT] * len(buckets)
        self._allowed_arms, self._runnable_arms = feasible, possible
        self._bounds = RowBounds(self.arms, bounds) if bounds else None

    def observe(self, report: StepReport) -> None:
        """Ignores the report; this rule needs only the estimates."""

    def update_proven(self, uncertainty: CostUncertainty) -> Sequence[int | None]:
        """Returns the newest choice of each bucket that has run, by arm index, or None.

        uncertainty: shows whether a step has run with an arm in any batch.
        """
        if self.choice is not None and self.choice != self.proven:
            has_run = uncertainty.arms_that_ran().tolist()
            self.proven = [
                chosen if has_run[chosen] else previous
                for chosen, previous in zip(self.choice, self.proven, strict=True)
            ]
        return self.proven

    def update(
        self,
        values: Values,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LOSS_LIMITS,
    ) -> Sequence[int]:
        """Changes the choice where the gain exceeds margin and price; returns an arm per bucket.

        discounts: [arms, buckets], factors on the values, see `value_uncertainty`.
        """
        value = _mask_excluded(self._runnable_arms, values.tokens_per_second)
        if discounts is not None:
            value = value * discounts
        is_within_bounds = self._arms_within_bounds(values, discounts)
        self.reasons = [Reason.EXPLOIT] * len(self.buckets)
        if self._allowed_arms is not None:
            self._mark_overridden(apply_bounds(value, is_within_bounds).argmax(axis=0))
            value = _mask_excluded(self._allowed_arms, value)
        if is_within_bounds is not None:
            value = self._apply_bounds(value, is_within_bounds)
        best_arms: list[int] = value.argmax(axis=0).tolist()
        if self.choice is None:
            self.choice = best_arms
            return self.choice
        return self._switch_choice(value, best_arms, values, limits)

    def _switch_choice(
        self, value: NDArray[np.float64], best_arms: list[int], values: Values, limits: LossLimits
    ) -> Sequence[int]:
        """Changes the choice to the best arm where that is worth its price.

        value: [arms, rows].
        """
        assert self.choice is not None
        is_affordable = self._affordable_arms(values, limits)
        if is_affordable is None and best_arms == self.choice:
            return self.choice
        value = _mask_excluded(is_affordable, value)
        for j, (best_arm, current_arm) in enumerate(zip(best_arms, self.choice, strict=True)):
            if best_arm == current_arm and (is_affordable is None or is_affordable[current_arm, j]):
                continue
            row_values = value[:, j].tolist()
            new_arm = self._best_worthwhile_arm(row_values, current_arm, j, values, limits)
            if new_arm != current_arm:
                self.choice[j] = new_arm
                self.switches += 1
            if new_arm != best_arm and self.reasons[j] is Reason.EXPLOIT:
                self.reasons[j] = Reason.HOLD
        return self.choice

    def _affordable_arms(self, values: Values, limits: LossLimits) -> NDArray[np.bool_] | None:
        """Marks [arms, buckets] whose drafter is awake or may be woken now; None for all."""
        if not values.has_wake_up_cost or not self._off_arms:
            return None
        wake_up_seconds = np.where(
            values.catch_up_seconds > 0, values.catch_up_seconds + values.switch_seconds, 0.0
        )
        is_affordable: NDArray[np.bool_] = (
            wake_up_seconds <= limits.wake_up_steps * values.plain_seconds
        )
        if self._allowed_arms is not None:
            # Where gamma = 0 may not run, the loss against it is undefined.
            is_affordable |= ~self._allowed_arms[self._is_off].any(axis=0)
        return None if is_affordable.all() else is_affordable

    def _best_worthwhile_arm(
        self, value: list[float], current_arm: int, row: int, values: Values, limits: LossLimits
    ) -> int:
        """Returns the best arm of a row that is worth a change, or `current_arm`.

        value: [arms], values of the row's arms; the arm is chosen by them.
        """
        current_value = max(value[current_arm], 1e-12)
        if not limits.prefers_off and (
            max(value) / current_value - 1 <= self._settings.switch_margin
        ):
            return current_arm
        for arm in sorted(range(len(value)), key=value.__getitem__, reverse=True):
            gain = value[arm] / current_value - 1
            if arm == current_arm or gain <= 0:
                return current_arm
            if limits.prefers_off:
                # More than half of what may be lost is used up: gamma = 0 needs no margin.
                if arm in self._off_arms:
                    return arm
            elif gain <= self._settings.switch_margin:
                # The remaining arms gain less.
                return current_arm
            price_seconds = values.catch_up_seconds.item(arm, row) + values.switch_seconds
            is_paid_back = gain * self._settings.payback_seconds > price_seconds
            if gain > self._settings.switch_margin and is_paid_back:
                return arm
        return current_arm

    def _mark_overridden(self, unconstrained: Sequence[int] | NDArray[np.int64]) -> None:
        assert self._allowed_arms is not None
        for j, arm in enumerate(unconstrained):
            is_possible = self._runnable_arms is None or self._runnable_arms[arm, j]
            if is_possible and not self._allowed_arms[arm, j]:
                self.reasons[j] = Reason.OVERRIDE

    def _apply_choice(self, choice: list[int], values: Values) -> list[int]:
        """Adopts the choice of a subclass (baseline_planners).

        Where that arm may not run, the best feasible arm is chosen.
        """
        self.reasons = [Reason.EXPLOIT] * len(self.buckets)
        if self._allowed_arms is not None:
            self._mark_overridden(choice)
            best = _mask_excluded(self._allowed_arms, values.tokens_per_second).argmax(axis=0)
            choice = [
                arm if self._allowed_arms[arm, j] else int(best[j]) for j, arm in enumerate(choice)
            ]
        if self._bounds is not None:
            choice = self._replace_out_of_bounds(choice, values)
        if self.choice is not None:
            self.switches += sum(a != b for a, b in zip(choice, self.choice, strict=True))
        self.choice = choice
        return choice

    def _arms_within_bounds(
        self, values: Values, discounts: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_] | None:
        """Returns [arms, buckets], which arms the engine can run within the bound; None: no bound.

        With `discounts`, the time divided by the discount must meet the bound.
        """
        if self._bounds is None:
            return None
        tpot_seconds = values.tpot_seconds if discounts is None else values.tpot_seconds / discounts
        is_within_bounds = self._bounds.arms_within_bounds(
            tpot_seconds, self.choice, self._settings.switch_margin
        )
        return (
            is_within_bounds
            if self._runnable_arms is None
            else is_within_bounds & self._runnable_arms
        )

    def _apply_bounds(
        self, value: NDArray[np.float64], is_within_bounds: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Applies the bounds to the values, and records which choices they exclude.

        value: of feasible arms, almost 0 for others.
        """
        if self._allowed_arms is not None:
            is_within_bounds = is_within_bounds & self._allowed_arms
        bounded_value = apply_bounds(value, is_within_bounds)
        self._record_excluded(value.argmax(axis=0), bounded_value.argmax(axis=0))
        return bounded_value

    def _replace_out_of_bounds(self, choice: list[int], values: Values) -> list[int]:
        """Replaces a rule's choices that exceed the bound by the best arm that meets it.

        If no arm meets it, the one with the smallest time per token is chosen.
        """
        value, is_within_bounds = (
            _mask_excluded(self._runnable_arms, values.tokens_per_second),
            self._arms_within_bounds(values),
        )
        assert is_within_bounds is not None
        if self._allowed_arms is not None:
            value, is_within_bounds = (
                _mask_excluded(self._allowed_arms, value),
                is_within_bounds & self._allowed_arms,
            )
        best_arms = apply_bounds(value, is_within_bounds).argmax(axis=0).tolist()
        bounded_choice = [
            arm if is_within_bounds[arm, j] else best_arms[j] for j, arm in enumerate(choice)
        ]
        self._record_excluded(choice, bounded_choice)
        return bounded_choice

    def _record_excluded(
        self,
        unbounded: Sequence[int] | NDArray[np.int64],
        chosen: Sequence[int] | NDArray[np.int64],
    ) -> None:
        assert self._bounds is not None
        pairs = enumerate(zip(unbounded, chosen, strict=True))
        self._excluded_arms = {j: int(arm) for j, (arm, replacement) in pairs if arm != replacement}
        for j in self._excluded_arms:
            if self._bounds.is_from_override[j]:
                self.reasons[j] = Reason.OVERRIDE

    def pop_excluded(self) -> dict[int, int]:
        """Returns, by row, the arm that was not chosen in the last update only because of a bound.

        The record is cleared: no later decision depends on it.
        """
        excluded, self._excluded_arms = self._excluded_arms, {}
        return excluded

    def probe_candidates(
        self, values: Values, row: int, probing_share: float
    ) -> NDArray[np.bool_] | None:
        """Returns [arms], which may be probed in a row after an update; None: all.

        probing_share: the share of step time that probes may cost.
        """
        feasible = None if self._allowed_arms is None else self._allowed_arms[:, row]
        if self._bounds is None or self.choice is None:
            return feasible
        probing_share = max(self._settings.probe_share, probing_share)
        tpot_seconds, seconds = values.tpot_seconds[:, row], values.costs.seconds[:, row]
        return self._bounds.probe_candidates(
            row, self.choice[row], tpot_seconds, seconds, feasible, probing_share
        )
