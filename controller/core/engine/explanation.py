"""Puts the last decision into words and numbers for people (`EngineController.explain`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.by_class import TrafficCurves
from controller.core.acceptance.estimator import AcceptanceCurve
from controller.core.acceptance.mixtures import MixtureUse
from controller.core.acceptance.traffic_state import Resemblance
from controller.core.checks.engine_checks import EngineWarning
from controller.core.engine.decision import Decision
from controller.core.engine_spec import Arm, LostCapability
from controller.core.plan import Plan, Probe, Reason
from controller.core.planning.constraints import PlanRows
from controller.core.planning.doubt import relative_variance
from controller.core.planning.overrides import Limits, Override
from controller.core.planning.planner import Values
from controller.core.planning.token_time import RowBounds, TokenTimeBound
from controller.core.training.selective_training import TrainingView
from controller.core.training.stride_planner import RegimeState


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """Tells how a row would change.

    stuck: the engine could run nothing of what is left there.  above_bound: nothing of what is left
    keeps the bound on the time per output token.
    """

    max_batch_size: int
    before: Arm
    after: Arm
    stuck: bool
    above_bound: bool = False


@dataclass(frozen=True, slots=True)
class ArmValue:
    """Holds the numbers by which an arm was judged at one batch size (units as in proto).

    cost_drift: factor by which live steps have moved its profiled cost.  catch_up_seconds: what
    changing to it now would cost first.  feasible: overrides let it run, and the engine can.
    seconds_per_token: expected mean time between a sequence's output tokens.
    """

    arm: Arm
    expected_accepted: float
    step_seconds: float
    tokens_per_second: float
    optimistic_tokens_per_second: float
    chosen: bool
    extrapolated: bool
    cost_drift: float = 1.0
    catch_up_seconds: float = 0.0
    feasible: bool = True
    seconds_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class PositionEstimate:
    """Holds P(position k accepted | k-1 were) of one drafter, and the evidence behind it.

    label: the request class, "" = all traffic.  deviation: the estimate's standard deviation.
    """

    drafter: str
    position: int
    conditional_acceptance: float
    exposures: float
    label: str = ""
    deviation: float = 0.0


@dataclass(frozen=True, slots=True)
class ValueTable:
    """Holds the numbers of every arm in every row of a plan.

    batch_sizes: of the rows, ascending; a row is valued at its size.  seconds (of a step),
    tokens_per_second, extrapolated and feasible: [arms][rows], arms as in `Explanation.arms`.
    """

    batch_sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    tokens_per_second: tuple[tuple[float, ...], ...]
    extrapolated: tuple[tuple[bool, ...], ...]
    feasible: tuple[tuple[bool, ...], ...]


NO_TABLE = ValueTable((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class PastTraffic:
    """Tells when traffic like the present one was last seen, and how often before."""

    began_seconds_ago: float
    ended_seconds_ago: float
    visits: int


def past_traffic(resembles: Resemblance | None, now: float) -> PastTraffic | None:
    """Returns the same relative to now, seconds of the clock."""
    if resembles is None:
        return None
    return PastTraffic(now - resembles.began, now - resembles.ended, resembles.visits)


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


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains the decision at one batch size.

    limits: what overrides leave there.  overrides: all that are for this engine.  warm_start:
    whose acceptance estimates it began from, "" = nobody's.  updates: what the stride of online
    updates was chosen from, None if it was not chosen.  training: the state of the drafter's
    training, None if the engine cannot train it.  table: the same numbers in all rows.  lost: what
    the engine can no longer do.  switch_seconds: what a change of arm costs, as measured.
    resembles: earlier traffic that the present one is taken for.  traffic_states: kinds of traffic
    that are remembered, the present one included.  bound: how the bound on the time per output
    token stands, None where no bound holds.  mixtures: by name, how those that ran were used.
    warnings: what the engine's reports show to be wrong with it.
    """

    engine_id: str
    batch_size: int
    plan: Plan
    arms: tuple[ArmValue, ...]
    positions: tuple[PositionEstimate, ...]
    profile_id: str
    margin: float
    probe_share: float
    kv_tokens_per_sequence: float
    runner_up: Arm
    policy: str
    probes: int
    probe_lost_seconds: float
    probe_credit_seconds: float
    shifts: int
    switches: int
    cost_outliers: int
    prior: str = ""
    limits: Limits | None = None
    overrides: tuple[Override, ...] = ()
    warm_start: str = ""
    updates: RegimeState | None = None
    training: TrainingView | None = None
    table: ValueTable = NO_TABLE
    lost: tuple[LostCapability, ...] = ()
    probe_steps: int = 0
    switch_seconds: float = 0.0
    resembles: PastTraffic | None = None
    traffic_states: int = 1
    bound: BoundState | None = None
    mixtures: Mapping[str, MixtureUse] = field(default_factory=dict)
    warnings: tuple[EngineWarning, ...] = ()


def value_table(at: PlanRows, values: Values) -> ValueTable:
    """Makes the table of all rows.  at: the rows that the values were made for."""
    costs = values.costs
    feasible = np.ones(costs.seconds.shape, dtype=bool) if at.feasible is None else at.feasible
    return ValueTable(
        tuple(at.upper),
        _rows(costs.seconds),
        _rows(values.value),
        _rows(costs.extrapolated),
        _rows(feasible),
    )


def _rows(matrix: NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def arms_in(
    made: Decision, arms: Sequence[Arm], row: int, chosen: int, confidence_z: float
) -> tuple[ArmValue, ...]:
    """Returns the numbers of every arm in one row of a decision.

    chosen: index of the planned arm.  confidence_z: standard deviations of optimism.
    """
    values, feasible, bucket = made.values, made.at.feasible, int(made.at.bucket[row])
    variance = relative_variance(values, made.estimates.uncertainty, arms, bucket, chosen)
    hoped = values.value[:, row] * (1 + confidence_z * np.sqrt(variance))
    drift = made.estimates.drift[:, bucket]
    tpot = values.tpot[:, row]
    return tuple(
        ArmValue(
            arm,
            float(values.expected[i, row]),
            float(values.costs.seconds[i, row]),
            float(values.value[i, row]),
            float(hoped[i]),
            i == chosen,
            bool(values.costs.extrapolated[i, row]),
            float(drift[i]),
            float(values.catch_up[i, row]),
            feasible is None or bool(feasible[i, row]),
            float(tpot[i]),
        )
        for i, arm in enumerate(arms)
    )


def behind(values: NDArray[np.float64]) -> tuple[int, float]:
    """Finds the second best arm's index, and by which share the best is better.  values: [arms]."""
    order = np.argsort(-values, kind="stable")
    best, runner_up = int(order[0]), int(order[min(1, len(order) - 1)])
    return runner_up, float(values[best] / values[runner_up] - 1)


def positions_of(traffic: TrafficCurves) -> tuple[PositionEstimate, ...]:
    """Returns the estimates of every drafter, over all traffic and for each request class."""
    found: list[PositionEstimate] = []
    for label, curves in {"": traffic.drafters, **traffic.classes}.items():
        for name, curve in curves.items():
            found += _estimates(name, curve, label)
    return tuple(found)


def preview_rows(
    plan: Plan, at: PlanRows, values: Values, arms: Sequence[Arm]
) -> tuple[PreviewRow, ...]:
    """Returns how a plan would change with other rows.  values: of these rows."""
    value = values.value if at.feasible is None else np.where(at.feasible, values.value, -1.0)
    keeps = _keeping(at, values, arms)
    above: NDArray[np.bool_] = keeps.sum(axis=0) == 0
    value = np.where(keeps | above, value, -1.0)
    rows = []
    for j, (upper, emptied) in enumerate(zip(at.upper, at.emptied, strict=True)):
        row = plan.row_for(upper)
        # What runs stays if it may, unless it only runs because something else might not.
        stays = value[arms.index(row.arm), j] >= 0 and row.reason is not Reason.OVERRIDE
        arm = row.arm if stays else arms[int(value[:, j].argmax())]
        rows.append(PreviewRow(upper, row.arm, arm, emptied, bool(above[j])))
    return tuple(rows)


def _keeping(at: PlanRows, values: Values, arms: Sequence[Arm]) -> NDArray[np.bool_]:
    """Returns [arms, rows], which arms may run and keep the row's bound."""
    keeps = np.ones(values.value.shape, dtype=bool) if at.feasible is None else at.feasible
    if at.bounds:
        keeps = keeps & RowBounds(arms, at.bounds).keeping(values.tpot, None, 0.0)
    return keeps


def bound_in(made: Decision, arms: Sequence[Arm], row: int, chosen: int) -> BoundState | None:
    """Returns how the bound of one row of a decision stands; None without a bound.

    chosen: index of the planned arm.
    """
    at, values = made.at, made.values
    bound = at.bounds[row] if at.bounds else None
    if bound is None:
        return None
    attainable: NDArray[np.bool_] = _keeping(at, values, arms).sum(axis=0) > 0
    kept = len(at.upper) if attainable.all() else int(attainable.argmin())
    excluded = made.excluded.get(row)
    return BoundState(
        bound,
        float(values.tpot[chosen, row]),
        bool(attainable[row]),
        None if excluded is None else arms[excluded],
        at.upper[kept - 1] if kept else 0,
    )


def bound_text(state: BoundState | None) -> str:
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


def _estimates(drafter: str, curve: AcceptanceCurve, label: str) -> list[PositionEstimate]:
    deviations = np.sqrt(curve.variance()).tolist()
    known = zip(curve.conditional, curve.exposures, deviations, strict=True)
    return [
        PositionEstimate(drafter, k, mean, exposures, label, deviation)
        for k, (mean, exposures, deviation) in enumerate(known, start=1)
    ]


def arm_text(arm: Arm, tokens_per_second: float) -> str:
    """Names an arm and what is expected of it, for people."""
    return f"{arm.drafter} gamma {arm.gamma}, {tokens_per_second:.0f} tok/s expected"


def why(
    choice: str,
    at: PlanRows,
    active: int,
    prior: str,
    probe: Probe | None,
    reason: Reason,
    bound: str = "",
    purpose: str = "to learn",
) -> tuple[Reason, str]:
    """Returns why a plan is what it is: its reason, and one line for people.

    choice, reason: of the active row.  prior: where costs come from without a profile, else "".
    bound: what its bound on the time per output token does, see `bound_text`.
    purpose: of the probe.
    """
    detail, limits = choice, at.limits[active]
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
        arm = probe.arm
        return Reason.PROBE, (
            f"{detail}; {probe.steps} steps of {arm.drafter} gamma {arm.gamma} {purpose}"
        )
    if prior and reason is not Reason.OVERRIDE:
        return Reason.PROFILE_MISSING, detail
    return reason, detail
