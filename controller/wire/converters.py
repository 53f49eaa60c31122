"""Where proto meets core, both ways, and nowhere else.

`…_from_proto` raise the core's own errors (InvalidEngineError, InvalidReportError) for what the
core's types refuse; the other direction cannot fail.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

from google.protobuf.message import Message

from controller.core.capabilities import added, require_known
from controller.core.engine.explanation import Explanation
from controller.core.errors import InvalidEngineError, InvalidReportError
from controller.core.kinds import DrafterKind
from controller.core.training.stride_planner import RegimeState
from controller.core.types import (
    MAX_GAMMA,
    MAX_REPORT_CLASSES,
    NO_FLAGS,
    Arm,
    Capabilities,
    ClassCounts,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    Plan,
    PlanRow,
    Probe,
    Reason,
    Regime,
    RegimeMode,
    StepFlags,
    StepReport,
)
from controller.wire.capabilities import all_lost_from_proto, lost_to_proto
from controller.wire.model_shapes import (
    drafter_shape_from_proto,
    drafter_shape_to_proto,
    model_shape_from_proto,
    model_shape_to_proto,
)
from controller.wire.overrides import limits_to_proto
from controller.wire.training import training_to_proto
from speculation.v1 import engine_pb2, plan_pb2, service_pb2

# Characters, or entries.
_LENGTH_MAX = 4096
# What fits in a packet of the shim's link.
_INTRODUCTION_BYTES = 64 * 1024
_KIND_TO_PROTO = {
    DrafterKind.MTP: engine_pb2.DRAFTER_KIND_MTP,
    DrafterKind.DFLASH: engine_pb2.DRAFTER_KIND_DFLASH,
    DrafterKind.STANDALONE: engine_pb2.DRAFTER_KIND_STANDALONE,
    DrafterKind.NGRAM: engine_pb2.DRAFTER_KIND_NGRAM,
}
_KIND_FROM_PROTO = {value: kind for kind, value in _KIND_TO_PROTO.items()}

_REASON_TO_PROTO = {
    Reason.EXPLOIT: plan_pb2.REASON_EXPLOIT,
    Reason.PROBE: plan_pb2.REASON_PROBE,
    Reason.HOLD: plan_pb2.REASON_HOLD,
    Reason.PROFILE_MISSING: plan_pb2.REASON_PROFILE_MISSING,
    Reason.PROFILING: plan_pb2.REASON_PROFILING,
    Reason.LEASE: plan_pb2.REASON_LEASE,
    Reason.OVERRIDE: plan_pb2.REASON_OVERRIDE,
}

_REGIME_TO_PROTO = {
    RegimeMode.OFF: plan_pb2.REGIME_MODE_OFF,
    RegimeMode.ONLINE: plan_pb2.REGIME_MODE_ONLINE,
    RegimeMode.COLLECT: plan_pb2.REGIME_MODE_COLLECT,
}


def engine_from_proto(message: engine_pb2.EngineSpec) -> EngineSpec:
    """Raises InvalidEngineError if the introduction contradicts itself, or is endless."""
    if (size := message.ByteSize()) > _INTRODUCTION_BYTES:
        raise InvalidEngineError(
            f"the introduction has {size} bytes: {_INTRODUCTION_BYTES} at most"
        )
    _bound(message)
    fingerprint, able = message.fingerprint, message.capabilities
    spec = EngineSpec(
        engine_id=message.engine_id,
        fingerprint=Fingerprint(
            target_model=fingerprint.target_model,
            target_revision=fingerprint.target_revision,
            engine=fingerprint.engine,
            engine_version=fingerprint.engine_version,
            device=fingerprint.device,
            dtype=fingerprint.dtype,
            quantization=fingerprint.quantization,
            # 0 is "not said" on the wire, and an engine that does not say runs on one.
            tensor_parallel_size=fingerprint.tensor_parallel_size or 1,
            data_parallel_size=fingerprint.data_parallel_size or 1,
            attention_backend=fingerprint.attention_backend,
            graph_batch_sizes=tuple(fingerprint.graph_batch_sizes),
            shim_version=fingerprint.shim_version,
        ),
        drafters=tuple(_drafter_from_proto(drafter) for drafter in message.drafters),
        max_batch_size=message.max_batch_size,
        capabilities=Capabilities(
            can_sleep=able.can_sleep,
            can_switch_drafter=able.can_switch_drafter,
            can_update_online=able.can_update_online,
            can_collect=able.can_collect,
            overlap_steps=able.overlap_steps,
            drafters_follow=able.drafters_follow,
            catch_up_steps=able.catch_up_steps,
            can_take_versions=able.can_take_versions,
        ),
        shape=model_shape_from_proto(message.shape) if message.HasField("shape") else None,
        safe_gamma=message.safe_gamma if message.HasField("safe_gamma") else None,
    )
    lost = all_lost_from_proto(message.lost)
    require_known(lost, spec)
    return replace(spec, lost=added(spec, lost)) if lost else spec


def _bound(message: Message) -> None:
    """An introduction is kept, shown and compared: none of its texts and lists may be endless."""
    for field, value in message.ListFields():
        length = len(value) if isinstance(value, Sequence) else 0
        if length > _LENGTH_MAX:
            raise InvalidEngineError(f"{field.name} is {length} long: {_LENGTH_MAX} at most")
        for part in value if length and not isinstance(value, str) else (value,):
            if isinstance(part, Message):
                _bound(part)


def _drafter_from_proto(message: engine_pb2.Drafter) -> DrafterSpec:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidEngineError(
            f"drafter {message.name!r}: kind {message.kind} is unspecified or not known here; "
            f"known are {', '.join(k.value for k in DrafterKind)}"
        )
    return DrafterSpec(
        message.name,
        kind,
        tuple(message.gammas),
        message.model,
        message.revision,
        drafter_shape_from_proto(message.shape, kind) if message.HasField("shape") else None,
        tuple((limit.gamma, limit.max_batch_size) for limit in message.batch_limits),
    )


def fingerprint_to_proto(fingerprint: Fingerprint) -> engine_pb2.Fingerprint:
    """What profiles belong to."""
    return engine_pb2.Fingerprint(
        target_model=fingerprint.target_model,
        target_revision=fingerprint.target_revision,
        engine=fingerprint.engine,
        engine_version=fingerprint.engine_version,
        device=fingerprint.device,
        dtype=fingerprint.dtype,
        quantization=fingerprint.quantization,
        tensor_parallel_size=fingerprint.tensor_parallel_size,
        data_parallel_size=fingerprint.data_parallel_size,
        attention_backend=fingerprint.attention_backend,
        graph_batch_sizes=fingerprint.graph_batch_sizes,
        shim_version=fingerprint.shim_version,
    )


def engine_to_proto(spec: EngineSpec) -> engine_pb2.EngineSpec:
    """The introduction as it came."""
    able = spec.capabilities
    return engine_pb2.EngineSpec(
        engine_id=spec.engine_id,
        fingerprint=fingerprint_to_proto(spec.fingerprint),
        drafters=[
            engine_pb2.Drafter(
                name=drafter.name,
                kind=_KIND_TO_PROTO[drafter.kind],
                gammas=drafter.gammas,
                model=drafter.model,
                revision=drafter.revision,
                shape=None if drafter.shape is None else drafter_shape_to_proto(drafter.shape),
                batch_limits=[
                    engine_pb2.BatchLimit(gamma=gamma, max_batch_size=largest)
                    for gamma, largest in drafter.batch_limits
                ],
            )
            for drafter in spec.drafters
        ],
        max_batch_size=spec.max_batch_size,
        capabilities=engine_pb2.Capabilities(
            can_sleep=able.can_sleep,
            can_switch_drafter=able.can_switch_drafter,
            can_update_online=able.can_update_online,
            can_collect=able.can_collect,
            overlap_steps=able.overlap_steps,
            drafters_follow=able.drafters_follow,
            catch_up_steps=able.catch_up_steps,
            can_take_versions=able.can_take_versions,
        ),
        shape=None if spec.shape is None else model_shape_to_proto(spec.shape),
        safe_gamma=spec.safe_gamma,
        lost=map(lost_to_proto, spec.lost),
    )


def report_from_proto(message: engine_pb2.StepReport) -> StepReport:
    """Raises InvalidReportError for what cannot be true."""
    _bound_report(message)
    flags = NO_FLAGS
    if message.HasField("flags"):
        said = message.flags
        flags = StepFlags(
            said.after_gap, said.eager_fallback, said.first_use, said.unsteered, said.switched,
            said.updating, said.drafter_reset,
        )  # fmt: skip
    return StepReport(
        message.step,
        message.batch_size,
        message.kv_tokens,
        message.drafter,
        message.gamma,
        tuple(message.accepted_counts),
        message.step_seconds,
        flags,
        message.plan_epoch,
        message.probe_id,
        tuple(ClassCounts(c.label, tuple(c.accepted_counts)) for c in message.classes),
        tuple(message.confidences),
        message.update_seconds,
        message.draft_version,
    )


def _bound_report(message: engine_pb2.StepReport) -> None:
    """Refuses lists without end by their length, before any of them is copied."""
    counts, classes = len(message.accepted_counts), message.classes
    if counts > MAX_GAMMA + 1 or len(message.confidences) > MAX_GAMMA:
        raise InvalidReportError(
            f"step {message.step}: {counts} accepted_counts and {len(message.confidences)} "
            f"confidences, at most {MAX_GAMMA + 1} and {MAX_GAMMA} are possible"
        )
    if classes and (
        len(classes) > MAX_REPORT_CLASSES
        or any(len(part.accepted_counts) > MAX_GAMMA + 1 for part in classes)
    ):
        raise InvalidReportError(
            f"step {message.step}: {len(classes)} classes, at most {MAX_REPORT_CLASSES} with "
            f"{MAX_GAMMA + 1} counts each are possible"
        )


def report_to_proto(report: StepReport) -> engine_pb2.StepReport:
    """The report as it came; flags are absent when none is set."""
    message = engine_pb2.StepReport(
        step=report.step,
        batch_size=report.batch_size,
        kv_tokens=report.kv_tokens,
        drafter=report.drafter,
        gamma=report.gamma,
        accepted_counts=report.accepted_counts,
        step_seconds=report.step_seconds,
        plan_epoch=report.plan_epoch,
        probe_id=report.probe_id,
        classes=[
            engine_pb2.ClassCounts(label=part.label, accepted_counts=part.accepted_counts)
            for part in report.classes
        ],
        confidences=report.confidences,
        update_seconds=report.update_seconds,
        draft_version=report.draft_version,
    )
    flags = report.flags
    if flags != NO_FLAGS:
        message.flags.CopyFrom(
            engine_pb2.StepFlags(
                after_gap=flags.after_gap,
                eager_fallback=flags.eager_fallback,
                first_use=flags.first_use,
                unsteered=flags.unsteered,
                switched=flags.switched,
                updating=flags.updating,
                drafter_reset=flags.drafter_reset,
            )
        )
    return message


def reason_to_proto(reason: Reason) -> plan_pb2.Reason.ValueType:
    """The enum value of the same name."""
    return _REASON_TO_PROTO[reason]


def plan_to_proto(plan: Plan) -> plan_pb2.Plan:
    """Lease in whole milliseconds, 1 at least."""
    return plan_pb2.Plan(
        epoch=plan.epoch,
        rows=[_row_to_proto(row) for row in plan.rows],
        regime=_regime_to_proto(plan.regime),
        lease_ms=max(1, round(plan.lease_seconds * 1000)),
        reason=_REASON_TO_PROTO[plan.reason],
        reason_detail=plan.reason_detail,
        overrides=plan.overrides,
        draft_version=plan.draft_version,
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


def _regime_to_proto(regime: Regime) -> plan_pb2.Regime:
    return plan_pb2.Regime(mode=_REGIME_TO_PROTO[regime.mode], stride=regime.stride)


def arm_from_proto(message: service_pb2.MeasureRequest) -> Arm:
    """What a measurement asks for."""
    return Arm(message.drafter, message.gamma)


def explanation_to_proto(explanation: Explanation) -> service_pb2.ExplainResponse:
    """The whole decision row, arms and positions in the order of the explanation."""
    return service_pb2.ExplainResponse(
        engine_id=explanation.engine_id,
        batch_size=explanation.batch_size,
        plan=plan_to_proto(explanation.plan),
        arms=[
            service_pb2.ArmExplanation(
                drafter=value.arm.drafter,
                gamma=value.arm.gamma,
                expected_accepted=value.expected_accepted,
                step_seconds=value.step_seconds,
                tokens_per_second=value.tokens_per_second,
                optimistic_tokens_per_second=value.optimistic_tokens_per_second,
                chosen=value.chosen,
                extrapolated=value.extrapolated,
                cost_drift=value.cost_drift,
                catch_up_seconds=value.catch_up_seconds,
                forbidden=not value.feasible,
                lost=any(loss.covers(value.arm) for loss in explanation.lost),
            )
            for value in explanation.arms
        ],
        positions=[
            service_pb2.PositionExplanation(
                drafter=estimate.drafter,
                position=estimate.position,
                conditional_acceptance=estimate.conditional_acceptance,
                exposures=estimate.exposures,
                label=estimate.label,
            )
            for estimate in explanation.positions
        ],
        profile_id=explanation.profile_id,
        margin=explanation.margin,
        probe_share=explanation.probe_share,
        kv_tokens_per_sequence=explanation.kv_tokens_per_sequence,
        runner_up_drafter=explanation.runner_up.drafter,
        runner_up_gamma=explanation.runner_up.gamma,
        policy=explanation.policy,
        warm_start=explanation.warm_start,
        probes=explanation.probes,
        probe_lost_seconds=explanation.probe_lost_seconds,
        probe_credit_seconds=explanation.probe_credit_seconds,
        shifts=explanation.shifts,
        switches=explanation.switches,
        cost_outliers=explanation.cost_outliers,
        prior=explanation.prior,
        limits=limits_to_proto(explanation.limits) if explanation.limits else None,
        updates=_updates_to_proto(explanation.updates) if explanation.updates else None,
        training=training_to_proto(explanation.training) if explanation.training else None,
        lost=map(lost_to_proto, explanation.lost),
    )


def _updates_to_proto(state: RegimeState) -> service_pb2.UpdatesExplanation:
    return service_pb2.UpdatesExplanation(
        strides=[service_pb2.StrideExplanation(**asdict(value)) for value in state.strides],
        updates=state.updates,
        gain=state.gain,
        gain_deviation=state.gain_deviation,
        update_seconds=state.update_seconds,
        lost_seconds=state.lost_seconds,
        trying=state.trying,
        trial_steps=state.trial_steps,
    )
