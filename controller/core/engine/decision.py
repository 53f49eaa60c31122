"""Keeps the estimates and values that a decision was made from, and says why it is what it is.

    reports -> estimators -> Estimates, of one moment -> Values, in the plan's rows -> choice

Whoever inspects a controller reads them here.  Inspecting therefore neither changes the estimators
nor shows numbers that no decision has used.  The reason is in words: they are a part of the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.by_class import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUp, CatchUpPrice
from controller.core.cost.model import CostModel
from controller.core.cost.table import Costs
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.plan import Probe, Reason
from controller.core.planning.constraints import PlanRows
from controller.core.planning.overrides import Override
from controller.core.planning.planner import Values, evaluate
from controller.core.planning.token_time import TokenTimeBound


@dataclass(frozen=True, slots=True)
class Estimates:
    """Holds all estimates of one moment, before overrides determine a plan's rows.

    costs, drift: [arms, buckets] of the cost table with what prompts add to a step, and the factors
    by which live steps have moved the table.  catch_up: by drafter, [buckets] seconds;
    catch_up_price: of any waking.  context: [buckets] tokens of a sequence.  switch_seconds: of any
    change of arm.  profile_id, prior: where costs come from, one of them "".
    """

    traffic: TrafficCurves
    costs: Costs
    drift: NDArray[np.float64]
    uncertainty: CostUncertainty
    catch_up: Mapping[str, NDArray[np.float64]]
    catch_up_price: CatchUpPrice
    context: NDArray[np.float64]
    switch_seconds: float
    profile_id: str
    prior: str

    @classmethod
    def of(
        cls,
        traffic: TrafficCurves,
        cost: CostModel,
        catch_up: CatchUp,
        context: NDArray[np.float64],
        switch_seconds: float,
        prefill_seconds: float,
    ) -> "Estimates":
        """Takes the present estimates of an engine, as copies where they would change.

        prefill_seconds: what prompts add to a step.
        """
        costs = cost.costs(context)
        if prefill_seconds:
            costs = Costs(costs.seconds + prefill_seconds, costs.extrapolated)
        return cls(
            traffic,
            costs,
            cost.drift(),
            cost.uncertainty(),
            catch_up.by_batch(cost.sizes, context),
            catch_up.price,
            context,
            switch_seconds,
            cost.profile_id,
            cost.prior,
        )

    def values(self, arms: Sequence[Arm], sizes: NDArray[np.float64], at: PlanRows) -> Values:
        """Returns the values of all arms in all rows.  sizes: [buckets], the costs' batches."""
        costs, catch_up = self.costs, self.catch_up
        if at.split:
            catch_up = {name: seconds[at.bucket] for name, seconds in catch_up.items()}
            costs = Costs(costs.seconds[:, at.bucket], costs.extrapolated[:, at.bucket])
            sizes = sizes[at.bucket]
        return evaluate(
            arms,
            sizes,
            self.traffic,
            costs,
            catch_up,
            self.catch_up_price,
            self.switch_seconds,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds what a decision was made from, and the overrides and rows that it was made under.

    reports: how many were folded before it.  excluded: by row, the arm (by index) that only a bound
    on the time per output token kept from being chosen.
    """

    estimates: Estimates
    values: Values
    at: PlanRows
    overrides: tuple[Override, ...]
    reports: int
    excluded: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundState:
    """Tells how a bound on the time per output token stands at one batch size.

    expected_seconds: of the planned arm.  attainable: an arm that may run there keeps it.
    excluded: the arm that would have been chosen without it, None where that is the same one.
    kept_up_to: up to this batch size every row has an arm that keeps its bound; 0 = not even the
    first row.
    """

    bound: TokenTimeBound
    expected_seconds: float
    attainable: bool
    excluded: Arm | None
    kept_up_to: int

    @property
    def is_kept(self) -> bool:
        """Tells whether the planned arm keeps the bound by the estimates."""
        return self.expected_seconds <= self.bound.seconds

    @property
    def binds(self) -> bool:
        """Tells whether the bound changes the choice, or is not kept."""
        return self.excluded is not None or not self.is_kept


def bound_in(made: Decision, arms: Sequence[Arm], row: int, chosen: int) -> BoundState | None:
    """Returns how the bound of one row of a decision stands; None without a bound.

    chosen: index of the planned arm.
    """
    at, values = made.at, made.values
    bound = at.bounds[row] if at.bounds else None
    if bound is None:
        return None
    attainable: NDArray[np.bool_] = at.keeping(arms, values.tpot).sum(axis=0) > 0
    kept = len(at.upper) if attainable.all() else int(attainable.argmin())
    excluded = made.excluded.get(row)
    return BoundState(
        bound,
        float(values.tpot[chosen, row]),
        bool(attainable[row]),
        None if excluded is None else arms[excluded],
        at.upper[kept - 1] if kept else 0,
    )


def _bound_text(state: BoundState | None) -> str:
    """Describes what a bound that binds does, for people; "" where it changes nothing."""
    if state is None or not state.binds:
        return ""
    if state.is_kept:
        assert state.excluded is not None
        return f"{state.bound} excludes {state.excluded.drafter} gamma {state.excluded.gamma}"
    ratio = state.expected_seconds / state.bound.seconds
    above = f"{max(ratio - 1, 0.001):.1%} above" if ratio < 2 else f"{ratio:.3g} times"
    found = f"{1e3 * state.expected_seconds:.2f} ms a token expected, {above} the {state.bound}"
    if state.attainable:
        return found
    where = f"batches up to {state.kept_up_to} keep it" if state.kept_up_to else "no batch keeps it"
    return f"{found}, which no choice keeps here; {where}"


def why(
    made: Decision,
    arms: Sequence[Arm],
    batch_size: int,
    chosen: int,
    reason: Reason,
    prior: str,
    probe: Probe | None,
    purpose: str,
) -> tuple[Reason, str]:
    """Returns why a plan is what it is: its reason, and one line for people.

    batch_size: the last reported one.  chosen, reason: what runs there, by arm index, and why.
    prior: where costs come from without a profile, else "".  purpose: of the probe.
    """
    at, arm = made.at, arms[chosen]
    active = at.row_of(batch_size)
    detail = (
        f"B={batch_size}: {arm.drafter} gamma {arm.gamma}, "
        f"{made.values.value[chosen, active]:.0f} tok/s expected"
    )
    limits, bound = at.limits[active], _bound_text(bound_in(made, arms, active, chosen))
    if limits.overrides:
        detail += f"; under {', '.join(limits.overrides)}"
        if at.emptied[active]:
            detail += ", which leave nothing that this engine can run: no speculation"
        pinned = next((loss for loss in at.lost if loss.drafter == limits.drafter), None)
        if limits.drafter is not None and pinned is not None:
            detail += f"; {pinned.what} is pinned but lost: {pinned.reason}"
    if bound:
        detail += f"; {bound}"
    if at.lost:
        detail += f"; lost: {', '.join(loss.what for loss in at.lost)}"
    if at.refused:
        detail += f"; {at.refused} is asked for, which this engine cannot do: no online updates"
    if prior:
        detail += f"; costs from a {prior} prior, no profile loaded"
    if probe:
        tried = f"{probe.arm.drafter} gamma {probe.arm.gamma}"
        return Reason.PROBE, f"{detail}; {probe.steps} steps of {tried} {purpose}"
    if prior and reason is not Reason.OVERRIDE:
        return Reason.PROFILE_MISSING, detail
    return reason, detail
