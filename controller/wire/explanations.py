"""Collects the numbers of an engine's last decision for people, and converts them to protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve
from controller.core.acceptance.mixtures import MixtureUsage
from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.acceptance.traffic_state import EarlierVisit
from controller.core.checks.engine_checks import EngineWarning
from controller.core.engine.decision import BoundState, Decision, row_bound_state
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, LostCapability
from controller.core.plan import Plan
from controller.core.planning.constraints import RowConstraints
from controller.core.planning.overrides import Limits, Override
from controller.core.planning.planner import Values
from controller.core.planning.value_uncertainty import relative_variance
from controller.core.training.selective_training import TrainingView
from controller.core.training.stride_planner import StridePlannerState
from controller.wire.engines import lost_capability_to_proto
from controller.wire.field_mapping import message_of
from controller.wire.overrides import limits_to_proto
from controller.wire.plans import plan_to_proto
from speculation.v1 import service_pb2, training_pb2


@dataclass(frozen=True, slots=True)
class ArmValue:
    """Holds the estimates for an arm at one batch size (units as in proto).

    cost_drift: factor by which live steps have corrected its profiled cost.  catch_up_seconds: the
    one-time cost of changing to it now.  feasible: overrides allow it, and the engine can run it.
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
    """Holds P(position k accepted | positions before it accepted) of one drafter, and its evidence.

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
    """Holds the estimates for every arm in every row of a plan.

    batch_sizes: one per row, ascending; a row is evaluated at its batch size.  seconds (of a step),
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
    """Holds when traffic like the present one was last seen, and how often before."""

    began_seconds_ago: float
    ended_seconds_ago: float
    visits: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains the decision at one batch size.

    limits: what overrides allow there.  overrides: all that apply to this engine.  runner_up: the
    second best arm, None if only one choice may run; margin: the best one's relative gain over it.
    warm_start: the source of its first acceptance estimates, "" = none.  updates: the candidates
    among which the stride of online updates was chosen, None if it was not chosen.  training: the
    state of the drafter's training, None if the engine cannot train it.  table: the same estimates
    in all rows.  lost: the capabilities that the engine has lost.  switch_seconds: the measured
    cost of a change of arm.  resembles: earlier traffic that the present one resembles.
    traffic_states: number of remembered kinds of traffic, the present one included.  bound: the
    state of the bound on the time per output token, None without a bound.  mixtures: by name, how
    the mixtures that ran were used.  warnings: problems that the engine's reports reveal.
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
    runner_up: Arm | None
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
    updates: StridePlannerState | None = None
    training: TrainingView | None = None
    table: ValueTable = NO_TABLE
    lost: tuple[LostCapability, ...] = ()
    probe_steps: int = 0
    switch_seconds: float = 0.0
    resembles: PastTraffic | None = None
    traffic_states: int = 1
    bound: BoundState | None = None
    mixtures: Mapping[str, MixtureUsage] = field(default_factory=dict)
    warnings: tuple[EngineWarning, ...] = ()


def explain(core: EngineController, batch_size: int = 0) -> Explanation:
    """Explains the last decision at a batch size (0: that of the last report)."""
    batch_size = batch_size or core.last_batch_size
    decision, plan = core.decision, core.current_plan()
    estimates, rows = decision.estimates, decision.constraints
    row = rows.row_of(batch_size)
    chosen = core.arms.index(plan.row_for(batch_size).arm)
    runner_up, margin = _runner_up(decision, core.arms, row, chosen)
    return Explanation(
        engine_id=core.spec.engine_id,
        batch_size=batch_size,
        plan=plan,
        arms=_arm_values(decision, core.arms, row, chosen, core.settings.confidence_z),
        positions=_position_estimates(estimates.traffic),
        profile_id=estimates.profile_id,
        margin=margin,
        probe_share=core.explorer.spent_share,
        kv_tokens_per_sequence=float(estimates.context_tokens[rows.cost_buckets[row]]),
        runner_up=runner_up,
        policy=core.settings.policy,
        probes=core.explorer.probe_count,
        probe_lost_seconds=core.explorer.lost_seconds,
        probe_credit_seconds=core.explorer.credit_seconds,
        shifts=core.traffic.shifts,
        switches=core.switches,
        cost_outliers=core.cost_model.rejected_steps,
        prior=estimates.prior,
        limits=rows.limits[row],
        overrides=decision.overrides,
        warm_start=core.warm_start,
        updates=core.updates.stride_state if rows.override_regime is None else None,
        training=core.updates.view,
        table=_value_table(rows, decision.values),
        lost=core.spec.lost,
        probe_steps=core.explorer.probe_steps,
        switch_seconds=estimates.switch_seconds,
        resembles=_past_traffic(estimates.traffic.earlier_visit, core.now),
        traffic_states=len(core.traffic.state_tracker.all_states),
        bound=row_bound_state(decision, core.arms, row, chosen),
        mixtures=core.mixture_estimators.usages(),
        warnings=core.checks.warnings(),
    )


def _past_traffic(resembles: EarlierVisit | None, now: float) -> PastTraffic | None:
    """Converts times of the clock into ages.  now: the present time of that clock, in seconds."""
    if resembles is None:
        return None
    return PastTraffic(now - resembles.began_at, now - resembles.ended_at, resembles.visits)


def _value_table(rows: RowConstraints, values: Values) -> ValueTable:
    """Makes the table of all rows.  rows: the rows that the values were computed for."""
    costs = values.costs
    feasible = np.ones(costs.seconds.shape, dtype=bool) if rows.feasible is None else rows.feasible
    return ValueTable(
        tuple(rows.upper_batch_sizes),
        _nested_tuples(costs.seconds),
        _nested_tuples(values.tokens_per_second),
        _nested_tuples(costs.extrapolated),
        _nested_tuples(feasible),
    )


def _nested_tuples(matrix: NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def _arm_values(
    decision: Decision, arms: Sequence[Arm], row: int, chosen: int, confidence_z: float
) -> tuple[ArmValue, ...]:
    """Returns the estimates for every arm in one row of a decision.

    chosen: index of the planned arm.  confidence_z: standard deviations of optimism.
    """
    values, feasible, bucket = (
        decision.values,
        decision.constraints.feasible,
        int(decision.constraints.cost_buckets[row]),
    )
    variance = relative_variance(values, decision.estimates.uncertainty, bucket, chosen)
    optimistic = values.tokens_per_second[:, row] * (1 + confidence_z * np.sqrt(variance))
    drift = decision.estimates.drift[:, bucket]
    tpot = values.tpot_seconds[:, row]
    return tuple(
        ArmValue(
            arm,
            float(values.expected_accepted[i, row]),
            float(values.costs.seconds[i, row]),
            float(values.tokens_per_second[i, row]),
            float(optimistic[i]),
            i == chosen,
            bool(values.costs.extrapolated[i, row]),
            float(drift[i]),
            float(values.catch_up_seconds[i, row]),
            feasible is None or bool(feasible[i, row]),
            float(tpot[i]),
        )
        for i, arm in enumerate(arms)
    )


def _runner_up(
    decision: Decision, arms: Sequence[Arm], row: int, chosen: int
) -> tuple[Arm | None, float]:
    """Returns the second best choice that may run, and the relative gain of the best over it.

    These are the arms that overrides and the engine allow and that keep the row's bound, or all
    allowed arms if none keeps it.  gamma = 0 is one choice, whichever drafter it is listed under.
    If there is only one choice, returns None and 0.0.  chosen: index of the planned arm, which
    ranks before other arms of equal value.
    """
    rows, values = decision.constraints, decision.values.tokens_per_second[:, row]
    may_run: NDArray[np.bool_] = rows.arms_within_bounds(arms, decision.values.tpot_seconds)[
        :, row
    ].copy()
    if not may_run.any():
        may_run[:] = True if rows.feasible is None else rows.feasible[:, row]
    may_run[chosen] = True
    ranked = sorted(may_run.nonzero()[0].tolist(), key=lambda i: (-values[i], i != chosen))
    choices: dict[tuple[str, int], int] = {}
    for i in ranked:
        choices.setdefault((arms[i].drafter if arms[i].gamma else "", arms[i].gamma), i)
    if len(choices) < 2:
        return None, 0.0
    best, second = list(choices.values())[:2]
    return arms[second], float(values[best] / values[second] - 1)


def _position_estimates(traffic: TrafficCurves) -> tuple[PositionEstimate, ...]:
    """Returns the estimates of every drafter, over all traffic and for each request class."""
    estimates: list[PositionEstimate] = []
    for label, curves in {"": traffic.all_traffic, **traffic.by_class}.items():
        for name, curve in curves.items():
            estimates += _drafter_estimates(name, curve, label)
    return tuple(estimates)


def _drafter_estimates(drafter: str, curve: AcceptanceCurve, label: str) -> list[PositionEstimate]:
    deviations = np.sqrt(curve.variance()).tolist()
    columns = zip(curve.conditional, curve.exposures, deviations, strict=True)
    return [
        PositionEstimate(drafter, k, mean, exposures, label, deviation)
        for k, (mean, exposures, deviation) in enumerate(columns, start=1)
    ]


def explanation_to_proto(explanation: Explanation) -> service_pb2.ExplainResponse:
    """Converts an explanation; arms and positions keep their order."""
    runner_up = explanation.runner_up
    return message_of(
        service_pb2.ExplainResponse,
        explanation,
        plan=plan_to_proto(explanation.plan),
        arms=[
            message_of(
                service_pb2.ArmExplanation,
                value,
                drafter=value.arm.drafter,
                gamma=value.arm.gamma,
                forbidden=not value.feasible,
                lost=any(lost_capability.covers(value.arm) for lost_capability in explanation.lost),
            )
            for value in explanation.arms
        ],
        positions=[
            message_of(service_pb2.PositionExplanation, estimate)
            for estimate in explanation.positions
        ],
        runner_up_drafter=runner_up.drafter if runner_up else "",
        runner_up_gamma=runner_up.gamma if runner_up else 0,
        limits=limits_to_proto(explanation.limits) if explanation.limits else None,
        updates=_updates_to_proto(explanation.updates) if explanation.updates else None,
        training=_training_to_proto(explanation.training) if explanation.training else None,
        lost=map(lost_capability_to_proto, explanation.lost),
        resembles=(
            message_of(service_pb2.PastTraffic, explanation.resembles)
            if explanation.resembles
            else None
        ),
        bound=_bound_to_proto(explanation.bound) if explanation.bound else None,
        mixtures=[
            message_of(service_pb2.MixtureExplanation, use, drafter=name)
            for name, use in explanation.mixtures.items()
        ],
        warnings=map(warning_to_proto, explanation.warnings),
        # The service adds them, with their remaining lifetime.
        overrides=None,
    )


def _bound_to_proto(state: BoundState) -> service_pb2.TokenTimeBound:
    excluded = state.excluded
    return message_of(
        service_pb2.TokenTimeBound,
        state,
        seconds=state.bound.seconds,
        override_id=state.bound.override_id,
        excluded_drafter=None if excluded is None else excluded.drafter,
        excluded_gamma=None if excluded is None else excluded.gamma,
    )


def _updates_to_proto(state: StridePlannerState) -> service_pb2.UpdatesExplanation:
    return message_of(
        service_pb2.UpdatesExplanation,
        state,
        strides=[message_of(service_pb2.StrideExplanation, value) for value in state.strides],
    )


def warning_to_proto(warning: EngineWarning) -> service_pb2.EngineWarning:
    """Converts a warning; its kind is the one in logs and metrics."""
    return message_of(service_pb2.EngineWarning, warning, kind=warning.kind.value)


def _training_to_proto(view: TrainingView) -> service_pb2.TrainingExplanation:
    state = view.state
    return service_pb2.TrainingExplanation(
        phase=view.phase,
        measured=state.measured,
        alpha_short=state.short,
        alpha_long=state.long,
        stored_signals=view.stored,
        signals_needed=view.signals_needed,
        rounds=state.round,
        draft_version=state.version,
        served_version=view.served_version,
        parent_version=state.parent,
        on_trial=state.trial is not None,
        learnt=view.learnt,
        past=[
            service_pb2.PastRound(
                round=message_of(training_pb2.TrainingRound, record.result),
                outcome=record.outcome,
            )
            for record in state.history
        ],
    )
