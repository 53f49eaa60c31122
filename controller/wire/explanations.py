"""Converts the core's explanation of a decision to protobuf."""

from controller.core.checks.warning import EngineWarning
from controller.core.engine.explanation import BoundState, Explanation
from controller.core.training.selective_training import TrainingView
from controller.core.training.stride_planner import RegimeState
from controller.wire.engines import lost_to_proto
from controller.wire.field_mapping import message_of
from controller.wire.overrides import limits_to_proto
from controller.wire.plans import plan_to_proto
from speculation.v1 import service_pb2, training_pb2


def explanation_to_proto(explanation: Explanation) -> service_pb2.ExplainResponse:
    """The whole decision row, arms and positions in the order of the explanation."""
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
                lost=any(loss.covers(value.arm) for loss in explanation.lost),
            )
            for value in explanation.arms
        ],
        positions=[
            message_of(service_pb2.PositionExplanation, estimate)
            for estimate in explanation.positions
        ],
        runner_up_drafter=explanation.runner_up.drafter,
        runner_up_gamma=explanation.runner_up.gamma,
        limits=limits_to_proto(explanation.limits) if explanation.limits else None,
        updates=_updates_to_proto(explanation.updates) if explanation.updates else None,
        training=_training_to_proto(explanation.training) if explanation.training else None,
        lost=map(lost_to_proto, explanation.lost),
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
        # The service adds them, with the time that is left.
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


def _updates_to_proto(state: RegimeState) -> service_pb2.UpdatesExplanation:
    return message_of(
        service_pb2.UpdatesExplanation,
        state,
        strides=[message_of(service_pb2.StrideExplanation, value) for value in state.strides],
    )


def warning_to_proto(warning: EngineWarning) -> service_pb2.EngineWarning:
    """The warning in words; its kind as logs and metrics name it."""
    return message_of(service_pb2.EngineWarning, warning, kind=warning.kind.value)


def _training_to_proto(view: TrainingView) -> service_pb2.TrainingExplanation:
    state = view.state
    return service_pb2.TrainingExplanation(
        phase=view.phase,
        measured=state.measured,
        alpha_short=state.short,
        alpha_long=state.long,
        stored_signals=view.stored,
        signals_needed=view.threshold,
        rounds=state.round,
        draft_version=state.version,
        served_version=view.served,
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
