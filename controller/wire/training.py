"""Training of the drafter, between proto and core."""

from controller.core.training.selective_training import TrainingResult, TrainingView
from controller.wire.field_mapping import message_of, value_of
from speculation.v1 import service_pb2, training_pb2

_ERROR_CHARACTERS = 500


def result_from_proto(message: training_pb2.TrainingRound) -> TrainingResult:
    """Converts the result of a training round.  Raises InvalidTrainingError."""
    return value_of(TrainingResult, message, error=message.error[:_ERROR_CHARACTERS])


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
        learnt=view.learnt,
        past=[
            service_pb2.PastRound(
                round=message_of(training_pb2.TrainingRound, record.result),
                outcome=record.outcome,
            )
            for record in state.history
        ],
    )
