"""Converts the core's explanation of a decision to protobuf."""

from dataclasses import asdict

from controller.core.engine.explanation import Explanation
from controller.core.training.stride_planner import RegimeState
from controller.wire.capabilities import lost_to_proto
from controller.wire.overrides import limits_to_proto
from controller.wire.plans import plan_to_proto
from controller.wire.training import training_to_proto
from speculation.v1 import service_pb2


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
