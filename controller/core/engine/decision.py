"""Keeps the estimates and values behind a decision, and puts the reason for it into words.

    reports -> estimators -> Estimates, of one moment -> Values, in the plan's rows -> choice

Inspection of a controller reads these objects.  It therefore neither changes the estimators nor
shows numbers that no decision has used.  The reason is text, because it is part of the plan.
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

    costs, drift: [arms, buckets], step costs including the mean cost of prompts, and the factors
    by which live steps changed the table.  catch_up: by drafter, [buckets] seconds; catch_up_price:
    of any wake-up.  context: [buckets], tokens per sequence.  switch_seconds: of any change of arm.
    profile_id, prior: the source of the costs; one of them is "".
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
        """Collects an engine's present estimates, copied if they can change later.

        prefill_seconds: mean seconds that prompts add to a step.
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
        """Returns the values of all arms in all rows.  sizes: [buckets], batch sizes."""
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
    """Holds the inputs of a decision, with its overrides and rows.

    reports: number of reports before it.  excluded: by row, the arm (by index) that was not chosen
    only because of a bound on the time per output token.
    """

    estimates: Estimates
    values: Values
    at: PlanRows
    overrides: tuple[Override, ...]
    reports: int
    excluded: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundState:
    """Describes the effect of a bound on the time per output token at one batch size.

    expected_seconds: of the planned arm.  attainable: an arm that may run there meets the bound.
    excluded: the arm that would have been chosen without it, None if that is the planned arm.
    kept_up_to: up to this batch size every row has an arm that meets its bound; 0 = not even the
    first row has one.
    """

    bound: TokenTimeBound
    expected_seconds: float
    attainable: bool
    excluded: Arm | None
    kept_up_to: int

    @property
    def is_kept(self) -> bool:
        """Whether the planned arm is expected to meet the bound."""
        return self.expected_seconds <= self.bound.seconds

    @property
    def binds(self) -> bool:
        """Whether the bound changes the choice, or is not met."""
        return self.excluded is not None or not self.is_kept


def bound_in(made: Decision, arms: Sequence[Arm], row: int, chosen: int) -> BoundState | None:
    """Returns the state of the bound of one row of a decision; None without a bound.

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
    """Describes the effect of a binding bound as text; "" if the bound has no effect."""
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
    """Returns a plan's reason, and one line of text about it.

    batch_size: the last reported one.  chosen, reason: the arm (by index) for it, and its reason.
    prior: the source of the costs without a profile, otherwise "".  purpose: of the probe.
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
