"""Converts the core's plans, with their rows, probes and regimes, to protobuf, and regimes back."""

from controller.core.engine_spec import Arm
from controller.core.plan import MixtureRule, Plan, PlanRow, Probe, Reason, Regime, RegimeMode
from controller.wire.field_mapping import numbers_of
from speculation.v1 import plan_pb2, service_pb2

_REASON_TO_PROTO: "dict[Reason, plan_pb2.Reason.ValueType]" = numbers_of(
    Reason, plan_pb2.Reason, "REASON_"
)
_MODE_TO_PROTO = numbers_of(RegimeMode, plan_pb2.RegimeMode, "REGIME_MODE_")
_MODE_FROM_PROTO = {number: mode for mode, number in _MODE_TO_PROTO.items()}


def reason_to_proto(reason: Reason) -> plan_pb2.Reason.ValueType:
    """Returns the enum value of the same name."""
    return _REASON_TO_PROTO[reason]


def plan_to_proto(plan: Plan, session: int = 0) -> plan_pb2.Plan:
    """Converts a plan.  session: the session's tag, 0 for a plan without a session.

    The lease is rounded to milliseconds and is at least 1.
    """
    return plan_pb2.Plan(
        epoch=plan.epoch,
        rows=[_row_to_proto(row) for row in plan.rows],
        regime=regime_to_proto(plan.regime),
        lease_ms=max(1, round(plan.lease_seconds * 1000)),
        reason=_REASON_TO_PROTO[plan.reason],
        reason_detail=plan.reason_detail,
        overrides=plan.overrides,
        draft_version=plan.draft_version,
        rules=map(_rule_to_proto, plan.rules),
        session=session,
    )


def _rule_to_proto(rule: MixtureRule) -> plan_pb2.MixtureRule:
    return plan_pb2.MixtureRule(
        drafter=rule.arm.drafter,
        gamma=rule.arm.gamma,
        main_expected=rule.main_expected,
        free_expected=rule.free_expected,
        least_match=rule.least_match,
        ratio_weight=rule.ratio_weight,
    )


def _row_to_proto(row: PlanRow) -> plan_pb2.PlanRow:
    return plan_pb2.PlanRow(
        max_batch_size=row.max_batch_size,
        drafter=row.arm.drafter,
        gamma=row.arm.gamma,
        probe=None if row.probe is None else _probe_to_proto(row.probe),
        reason=_REASON_TO_PROTO[row.reason],
        drafter_asleep=row.drafter_asleep,
    )


def _probe_to_proto(probe: Probe) -> plan_pb2.Probe:
    return plan_pb2.Probe(
        probe_id=probe.probe_id,
        drafter=probe.arm.drafter,
        gamma=probe.arm.gamma,
        steps=probe.steps,
    )


def regime_to_proto(regime: Regime) -> plan_pb2.Regime:
    """Converts the mode of online updates and their stride."""
    return plan_pb2.Regime(mode=_MODE_TO_PROTO[regime.mode], stride=regime.stride)


def regime_from_proto(message: plan_pb2.Regime) -> Regime | None:
    """Returns None for an unknown mode."""
    mode = _MODE_FROM_PROTO.get(message.mode)
    return None if mode is None else Regime(mode, message.stride)


def arm_from_proto(message: service_pb2.MeasureRequest) -> Arm:
    """Returns the arm that a measurement requests."""
    return Arm(message.drafter, message.gamma)
