"""Keeps the estimates and values behind a decision, and puts the reason for it into words.

    reports -> estimators -> Estimates, of one moment -> Values, in the plan's rows -> choice

Inspection of a controller reads these objects.  It therefore neither changes the estimators nor
shows numbers that no decision has used.  The reason is text, because it is part of the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpEstimator, CatchUpPrice
from controller.core.cost.model import CostModel
from controller.core.cost.table import Costs
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.plan import Probe, Reason
from controller.core.planning.constraints import RowConstraints
from controller.core.planning.overrides import Override
from controller.core.planning.planner import Values, evaluate_arms
from controller.core.planning.token_time import TokenTimeBound


@dataclass(frozen=True, slots=True)
class Estimates:
    """Holds all estimates of one moment, before overrides determine a plan's rows.

    costs, drift: [arms, buckets], step costs including the mean cost of prompts, and the factors
    by which live steps changed the table.  catch_up_seconds: by drafter that has missed tokens,
    [buckets] seconds; catch_up_price: of any wake-up.  context_tokens: [buckets], tokens per
    sequence.  switch_seconds: of any change of arm. profile_id, prior: the source of the costs; one
    of them is "".
    """

    traffic: TrafficCurves
    costs: Costs
    drift: NDArray[np.float64]
    uncertainty: CostUncertainty
    catch_up_seconds: Mapping[str, NDArray[np.float64]]
    catch_up_price: CatchUpPrice
    context_tokens: NDArray[np.float64]
    switch_seconds: float
    profile_id: str
    prior: str

    @classmethod
    def collect(
        cls,
        traffic: TrafficCurves,
        cost_model: CostModel,
        catch_up_estimator: CatchUpEstimator,
        context_tokens: NDArray[np.float64],
        switch_seconds: float,
        prefill_seconds: float,
    ) -> "Estimates":
        """Collects an engine's present estimates, copied if they can change later.

        prefill_seconds: mean seconds that prompts add to a step.
        """
        costs = cost_model.costs(context_tokens)
        if prefill_seconds:
            costs = Costs(costs.seconds + prefill_seconds, costs.extrapolated)
        return cls(
            traffic,
            costs,
            cost_model.drift(),
            cost_model.uncertainty(),
            catch_up_estimator.seconds_by_batch(cost_model.sizes, context_tokens),
            catch_up_estimator.price,
            context_tokens,
            switch_seconds,
            cost_model.profile_id,
            cost_model.prior,
        )

    def values_for_rows(
        self, arms: Sequence[Arm], sizes: NDArray[np.float64], constraints: RowConstraints
    ) -> Values:
        """Returns the values of all arms in all rows.  sizes: [buckets], batch sizes."""
        costs, catch_up_seconds = self.costs, self.catch_up_seconds
        if constraints.has_split_buckets:
            catch_up_seconds = {
                name: seconds[constraints.cost_buckets]
                for name, seconds in catch_up_seconds.items()
            }
            costs = Costs(
                costs.seconds[:, constraints.cost_buckets],
                costs.extrapolated[:, constraints.cost_buckets],
            )
            sizes = sizes[constraints.cost_buckets]
        return evaluate_arms(
            arms,
            sizes,
            self.traffic,
            costs,
            catch_up_seconds,
            self.catch_up_price,
            self.switch_seconds,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds the inputs of a decision, with its overrides and rows.

    report_count: number of reports before it.  excluded: by row, the arm (by index) that was not
    chosen only because of a bound on the time per output token.
    """

    estimates: Estimates
    values: Values
    constraints: RowConstraints
    overrides: tuple[Override, ...]
    report_count: int
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
    def is_binding(self) -> bool:
        """Whether the bound changes the choice, or is not met."""
        return self.excluded is not None or not self.is_kept


def row_bound_state(
    decision: Decision, arms: Sequence[Arm], row: int, chosen: int
) -> BoundState | None:
    """Returns the state of the bound of one row of a decision; None without a bound.

    chosen: index of the planned arm.
    """
    constraints, values = decision.constraints, decision.values
    bound = constraints.bounds[row] if constraints.bounds else None
    if bound is None:
        return None
    attainable: NDArray[np.bool_] = (
        constraints.arms_within_bounds(arms, values.tpot_seconds).sum(axis=0) > 0
    )
    kept_rows = len(constraints.upper_batch_sizes) if attainable.all() else int(attainable.argmin())
    excluded = decision.excluded.get(row)
    return BoundState(
        bound,
        float(values.tpot_seconds[chosen, row]),
        bool(attainable[row]),
        None if excluded is None else arms[excluded],
        constraints.upper_batch_sizes[kept_rows - 1] if kept_rows else 0,
    )


def _bound_text(state: BoundState | None) -> str:
    """Describes the effect of a binding bound as text; "" if the bound has no effect."""
    if state is None or not state.is_binding:
        return ""
    if state.is_kept:
        assert state.excluded is not None
        return f"{state.bound} excludes {state.excluded.drafter} gamma {state.excluded.gamma}"
    ratio = state.expected_seconds / state.bound.seconds
    excess_text = f"{max(ratio - 1, 0.001):.1%} above" if ratio < 2 else f"{ratio:.3g} times"
    text = (
        f"{1e3 * state.expected_seconds:.2f} ms a token expected, {excess_text} the {state.bound}"
    )
    if state.attainable:
        return text
    kept_text = (
        f"batches up to {state.kept_up_to} keep it" if state.kept_up_to else "no batch keeps it"
    )
    return f"{text}, which no choice keeps here; {kept_text}"


def plan_reason(row_reason: Reason, prior: str, probe: Probe | None) -> Reason:
    """Returns a plan's reason.

    row_reason: of the row of the last batch.  prior, probe: as in `describe_decision`.
    """
    if probe:
        return Reason.PROBE
    return Reason.PROFILE_MISSING if prior and row_reason is not Reason.OVERRIDE else row_reason


def describe_decision(
    decision: Decision,
    arms: Sequence[Arm],
    batch_size: int,
    chosen: int,
    prior: str,
    probe: Probe | None,
    probe_purpose: str,
) -> str:
    """Returns one line of text about a plan.

    batch_size: the last reported one.  chosen: the arm (by index) for it.  prior: the source of the
    costs without a profile, otherwise "".  probe: the running one; probe_purpose: its purpose.
    """
    constraints, arm = decision.constraints, arms[chosen]
    active_row = constraints.row_of(batch_size)
    detail = (
        f"B={batch_size}: {arm.drafter} gamma {arm.gamma}, "
        f"{decision.values.tokens_per_second[chosen, active_row]:.0f} tok/s expected"
    )
    limits, bound_text = (
        constraints.limits[active_row],
        _bound_text(row_bound_state(decision, arms, active_row, chosen)),
    )
    if limits.overrides:
        detail += f"; under {', '.join(limits.overrides)}"
        if constraints.is_emptied[active_row]:
            detail += ", which leave nothing that this engine can run: no speculation"
        pinned_lost = next(
            (loss for loss in constraints.lost if loss.drafter == limits.drafter), None
        )
        if limits.drafter is not None and pinned_lost is not None:
            detail += f"; {pinned_lost.description} is pinned but lost: {pinned_lost.reason}"
    if bound_text:
        detail += f"; {bound_text}"
    if constraints.lost:
        detail += f"; lost: {', '.join(loss.description for loss in constraints.lost)}"
    if constraints.refused_regime:
        detail += (
            f"; {constraints.refused_regime} is asked for, which this engine cannot do: "
            "no online updates"
        )
    if prior:
        detail += f"; costs from a {prior} prior, no profile loaded"
    if probe:
        probe_text = f"{probe.arm.drafter} gamma {probe.arm.gamma}"
        return f"{detail}; {probe.steps} steps of {probe_text} {probe_purpose}"
    return detail
