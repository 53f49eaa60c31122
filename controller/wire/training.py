"""Training of the drafter, between proto and core."""

from controller.core.training.selective_training import TrainingResult, TrainingView
from speculation.v1 import service_pb2, training_pb2

_ERROR_CHARACTERS = 500


def result_from_proto(message: training_pb2.TrainingRound) -> TrainingResult:
    """Raises InvalidTrainingError."""
    return TrainingResult(
        message.round,
        message.version,
        message.alpha_train,
        message.alpha_eval,
        message.alpha_before,
        message.error[:_ERROR_CHARACTERS],
    )


def training_to_proto(view: TrainingView) -> service_pb2.TrainingExplanation:
    """The state, for people."""
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
        past=[
            service_pb2.PastRound(
                round=training_pb2.TrainingRound(
                    round=record.result.round,
                    version=record.result.version,
                    alpha_train=record.result.alpha_train,
                    alpha_eval=record.result.alpha_eval,
                    alpha_before=record.result.alpha_before,
                    error=record.result.error,
                ),
                outcome=record.outcome,
            )
            for record in state.history
        ],
    )
