"""Chooses an arm for each batch size: argmax of tokens per second, with hysteresis.

    V(d, gamma, B) = B * (1 + E_d[accepted | gamma]) / C(d, B, gamma, kv)

gamma = 0 is an arm like any other (E = 0), and is charged the `observation_cost` of observing
nothing.  The choice changes only if another arm's value is higher by `switch_margin`, so that noise
near a break-even point does not cause switching, and if the gain pays back the cost of the change
(an idle drafter has to catch up) within `payback_seconds`.  A bound on the time per output token
excludes the arms that exceed it (`token_time`).  A drafter is woken only within the allowed loss
against gamma = 0 (`loss_account`); until then the best arm that needs no wake-up runs.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.by_class import TrafficCurves
from controller.core.acceptance.shifts import Hazard
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.engine_spec import Arm
from controller.core.plan import Reason
from controller.core.planning.observation_cost import ObservationCost, ObservationPlanner
from controller.core.planning.token_time import RowBounds, TokenTimeBound, narrowed
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Factor on the value of an arm that may not run.
_UNTHINKABLE = 1e-12


@dataclass(frozen=True, slots=True)
class Values:
    """Holds all inputs of the choice.

    traffic: the acceptance curves.  expected: [arms, buckets], expected accepted draft tokens.
    catch_up: [arms, buckets], seconds that the arm's drafter first needs to catch up.
    switch_seconds: cost of any change of arm.  costs, value: [arms, buckets], value in tokens per
    second of the whole batch.
    """

    traffic: TrafficCurves
    expected: NDArray[np.float64]
    costs: Costs
    catch_up: NDArray[np.float64]
    catch_up_price: CatchUpPrice
    value: NDArray[np.float64]
    switch_seconds: float = 0.0

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Returns [arms, buckets], the expected seconds between a sequence's output tokens."""
        return self.costs.seconds / (1 + self.expected)


def evaluate(
    arms: Sequence[Arm],
    sizes: NDArray[np.float64],
    traffic: TrafficCurves,
    costs: Costs,
    catch_up: Mapping[str, NDArray[np.float64]],
    catch_up_price: CatchUpPrice,
    switch_seconds: float = 0.0,
) -> Values:
    """Computes the values of all arms at all buckets.

    catch_up: by drafter, [buckets] seconds.
    """
    expected = traffic.expected(arms, sizes)
    price = np.zeros(expected.shape)
    for i, arm in enumerate(arms):
        if arm.gamma:
            price[i] = catch_up[arm.drafter]
    return Values(
        traffic,
        expected,
        costs,
        price,
        catch_up_price,
        (1 + expected) * sizes / costs.seconds,
        switch_seconds,
    )


def _only(may: NDArray[np.bool_] | None, value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [arms, rows]: the values, almost 0 where an arm may not run.  may: None for all."""
    return value if may is None else np.where(may, value, value * _UNTHINKABLE)


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Limits the loss against plain decoding now, see `loss_account`.

    waking: plain steps that waking a drafter may cost, [arms, rows] or one for all.
    by_belief: whether gamma = 0 is not charged for what it does not observe.
    """

    waking: float | NDArray[np.float64] = math.inf
    by_belief: bool = False


NO_LIMITS = LossLimits()


@recorded("planner", "choice observation proven reasons switches")
class Planner:
    """Holds the present choice per bucket, which only `update` changes."""

    explores = True
    # Whether `update` uses discounts.
    is_cautious = True

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        self.arms = tuple(arms)
        self.buckets = tuple(buckets)
        self._settings = settings
        self._off = np.array([arm.gamma == 0 for arm in arms])
        self._observation_planner = ObservationPlanner(
            arms, np.asarray(buckets, dtype=np.float64), settings
        )
        self._feasible: NDArray[np.bool_] | None = None
        self._possible: NDArray[np.bool_] | None = None
        self._bounds: RowBounds | None = None
        # In the present update: by row, the arm that is not chosen only because of a bound.
        self._excluded: dict[int, int] = {}
        self.observation: ObservationCost | None = None
        self.choice: list[int] | None = None
        # The newest choice of each bucket that has run; None where none has.
        self.proven: list[int | None] = [None] * len(buckets)
        self.reasons: list[Reason] = [Reason.EXPLOIT] * len(buckets)
        self.switches = 0

    def limit(
        self,
        buckets: Sequence[int],
        sizes: NDArray[np.float64],
        feasible: NDArray[np.bool_] | None,
        possible: NDArray[np.bool_] | None = None,
        bounds: Sequence[TokenTimeBound | None] = (),
    ) -> None:
        """Replaces the rows, and sets which arms may run in them.

        buckets: upper ends, ascending.  sizes: the batch size at which each row is valued.
        possible, feasible, bounds: as in `PlanRows`.
        """
        if self.choice is not None:
            old = [min(bisect_left(self.buckets, b), len(self.buckets) - 1) for b in buckets]
            self.choice = [self.choice[j] for j in old]
            self.proven = [self.proven[j] for j in old]
        else:
            self.proven = [None] * len(buckets)
        self.buckets = tuple(buckets)
        self.reasons = [Reason.EXPLOIT] * len(buckets)
        self._observation_planner = ObservationPlanner(self.arms, sizes, self._settings)
        self.observation = None
        self._feasible, self._possible = feasible, possible
        self._bounds = RowBounds(self.arms, bounds) if bounds else None

    def observe(self, report: StepReport) -> None:
        """Ignores the report; this rule needs only the estimates."""

    def prove(self, ran: NDArray[np.bool_]) -> Sequence[int | None]:
        """Returns the newest choice of each bucket that has run, by arm index, or None.

        ran: [arms], whether a step has run with the arm in any batch.
        """
        if self.choice is not None:
            has_run, pairs = ran.tolist(), zip(self.choice, self.proven, strict=True)
            self.proven = [now if has_run[now] else before for now, before in pairs]
        return self.proven

    def update(
        self,
        values: Values,
        hazard: Hazard,
        discounts: NDArray[np.float64] | None = None,
        limits: LossLimits = NO_LIMITS,
    ) -> Sequence[int]:
        """Changes the choice where the gain exceeds margin and price; returns an arm per bucket.

        discounts: [arms, buckets], factors on the values, see `doubt`.
        """
        value = _only(self._possible, values.value)
        if discounts is not None:
            value = value * discounts
        plain, keeps = value, self._keeping(values, discounts)
        if self._off[narrowed(plain, plain, keeps).argmax(axis=0)].any():
            self.observation = self._observation_planner.observation(
                self._looked_at(value, keeps), values.costs.seconds, values.catch_up_price, hazard
            )
            if self.observation is not None and not limits.by_belief:
                value = np.where(self._off[:, None], value * (1 - self.observation.loss), value)
        self.reasons = [Reason.EXPLOIT] * len(self.buckets)
        if self._feasible is not None:
            self._say_overridden(narrowed(value, plain, keeps).argmax(axis=0))
            value = _only(self._feasible, value)
        if keeps is not None:
            value = self._bounded(value, plain, keeps)
        best: list[int] = value.argmax(axis=0).tolist()
        if self.choice is None:
            self.choice = best
            return self.choice
        return self._move(value, best, values, limits)

    def _move(
        self, value: NDArray[np.float64], best: list[int], values: Values, limits: LossLimits
    ) -> Sequence[int]:
        """Changes the choice to the best arm where that is worth its price.

        value: [arms, rows].
        """
        assert self.choice is not None
        awake = self._affordable(values, limits)
        if awake is None and best == self.choice:
            return self.choice
        value = _only(awake, value)
        for j, (wanted, now) in enumerate(zip(best, self.choice, strict=True)):
            if wanted == now and (awake is None or awake[now, j]):
                continue
            taken = self._worth_it(value[:, j].tolist(), now, j, values, limits)
            if taken != now:
                self.choice[j] = taken
                self.switches += 1
            if taken != wanted and self.reasons[j] is Reason.EXPLOIT:
                self.reasons[j] = Reason.HOLD
        return self.choice

    def _affordable(self, values: Values, limits: LossLimits) -> NDArray[np.bool_] | None:
        """Marks [arms, buckets] whose drafter is awake or may be woken now; None for all."""
        if not values.catch_up.any() or not self._off.any():
            return None
        price = np.where(values.catch_up > 0, values.catch_up + values.switch_seconds, 0.0)
        plain = values.costs.seconds[self._off].min(axis=0)
        found: NDArray[np.bool_] = price <= limits.waking * plain
        if self._feasible is not None:
            # Where gamma = 0 may not run, the loss against it is undefined.
            found |= ~self._feasible[self._off].any(axis=0)
        return None if found.all() else found

    def _worth_it(
        self, value: list[float], now: int, row: int, values: Values, limits: LossLimits
    ) -> int:
        """Returns the best arm of a row that is worth a change from `now`; `now` if none is.

        value: [arms] of the row, by which it is chosen.
        """
        least = max(value[now], 1e-12)
        for arm in sorted(range(len(value)), key=value.__getitem__, reverse=True):
            gain = value[arm] / least - 1
            if arm == now or gain <= 0:
                return now
            if limits.by_belief:
                if self._off[arm]:
                    return arm
            elif gain <= self._settings.switch_margin:
                # The remaining arms gain less.
                return now
            price = values.catch_up.item(arm, row) + values.switch_seconds
            paid_back = gain * self._settings.payback_seconds > price
            if gain > self._settings.switch_margin and paid_back:
                return arm
        return now

    def _say_overridden(self, wanted: Sequence[int] | NDArray[np.int64]) -> None:
        assert self._feasible is not None
        for j, arm in enumerate(wanted):
            is_possible = self._possible is None or self._possible[arm, j]
            if is_possible and not self._feasible[arm, j]:
                self.reasons[j] = Reason.OVERRIDE

    def _take(self, choice: list[int], values: Values) -> list[int]:
        """Adopts a rule's choice, or the best feasible arm where that may not run."""
        self.reasons = [Reason.EXPLOIT] * len(self.buckets)
        if self._feasible is not None:
            self._say_overridden(choice)
            best = _only(self._feasible, values.value).argmax(axis=0)
            choice = [
                arm if self._feasible[arm, j] else int(best[j]) for j, arm in enumerate(choice)
            ]
        if self._bounds is not None:
            choice = self._within_bounds(choice, values)
        if self.choice is not None:
            self.switches += sum(a != b for a, b in zip(choice, self.choice, strict=True))
        self.choice = choice
        return choice

    def _keeping(
        self, values: Values, discounts: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_] | None:
        """Returns [arms, buckets], which arms the engine can run within the bound; None: no bound.

        If costs were not measured, the bad case must meet the bound: see `discounts`.
        """
        if self._bounds is None:
            return None
        tpot = values.tpot if discounts is None else values.tpot / discounts
        keeps = self._bounds.keeping(tpot, self.choice, self._settings.switch_margin)
        return keeps if self._possible is None else keeps & self._possible

    def _looked_at(
        self, value: NDArray[np.float64], keeps: NDArray[np.bool_] | None
    ) -> NDArray[np.float64]:
        if self._bounds is None or keeps is None:
            return value
        return self._bounds.looked_at(value, keeps)

    def _bounded(
        self, value: NDArray[np.float64], plain: NDArray[np.float64], keeps: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Applies the bounds to the values, and records which choices they exclude.

        value: of feasible arms, almost 0 for others.  plain: of all arms, without the price of
        observing nothing.
        """
        if self._feasible is not None:
            keeps = keeps & self._feasible
            plain = _only(self._feasible, plain)
        kept = narrowed(value, plain, keeps)
        self._say_excluded(value.argmax(axis=0), kept.argmax(axis=0))
        return kept

    def _within_bounds(self, choice: list[int], values: Values) -> list[int]:
        """Replaces a rule's choices that exceed the bound by the best arm that meets it.

        If no arm meets it, the one with the smallest time per token is chosen.
        """
        value, keeps = _only(self._possible, values.value), self._keeping(values)
        assert keeps is not None
        if self._feasible is not None:
            value, keeps = _only(self._feasible, value), keeps & self._feasible
        best = narrowed(value, value, keeps).argmax(axis=0).tolist()
        kept = [arm if keeps[arm, j] else best[j] for j, arm in enumerate(choice)]
        self._say_excluded(choice, kept)
        return kept

    def _say_excluded(
        self,
        wanted: Sequence[int] | NDArray[np.int64],
        chosen: Sequence[int] | NDArray[np.int64],
    ) -> None:
        assert self._bounds is not None
        pairs = enumerate(zip(wanted, chosen, strict=True))
        self._excluded = {j: int(arm) for j, (arm, instead) in pairs if arm != instead}
        for j in self._excluded:
            if self._bounds.commanded[j]:
                self.reasons[j] = Reason.OVERRIDE

    def take_excluded(self) -> dict[int, int]:
        """Returns, by row, the arm that was not chosen in the last update only because of a bound.

        The record is cleared: no later decision depends on it.
        """
        excluded, self._excluded = self._excluded, {}
        return excluded

    def may_probe(self, values: Values, row: int) -> NDArray[np.bool_] | None:
        """Returns [arms], which may be probed in a row after an update; None: all."""
        feasible = None if self._feasible is None else self._feasible[:, row]
        if self._bounds is None or self.choice is None:
            return feasible
        share = self._settings.probe_share
        if self.observation is not None:
            share = max(share, float(self.observation.share[row]))
        tpot, seconds = values.tpot[:, row], values.costs.seconds[:, row]
        return self._bounds.may_probe(row, self.choice[row], tpot, seconds, feasible, share)
