"""Serves the TrainingService, which attaches a trainer to an engine and processes its results."""

from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio
import structlog

from controller.core.errors import error_field_prefix
from controller.core.training.selective_training import SelectiveTraining, TrainingResult
from controller.service.net import callers
from controller.service.net.callers import Right
from controller.service.net.errors import (
    CannotTrainError,
    ForbiddenError,
    TrainerAttachedError,
)
from controller.service.rpc import streams
from controller.service.rpc.streams import read_message
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.training_state import TrainingStateFiles
from controller.wire.reports import training_result_from_proto
from speculation.v1 import training_pb2, training_pb2_grpc

_Context: TypeAlias = grpc.aio.ServicerContext[
    training_pb2.AttendRequest, training_pb2.AttendResponse
]

_log = structlog.get_logger(__name__)


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    """Serves the calls of trainers."""

    def __init__(self, registry: SessionRegistry, files: TrainingStateFiles) -> None:
        self._registry = registry
        self._files = files

    async def Attend(  # type: ignore[override]  # grpc.aio also takes a coroutine that reads and writes through its context
        self,
        request_iterator: AsyncIterator[training_pb2.AttendRequest],
        context: _Context,
    ) -> None:
        """Serves one trainer until either side ends the call."""
        first_request = await streams.read_first_message(context)
        if first_request is None:
            return
        session = self._registry.find_by_engine(first_request.engine_id)
        callers.require_engine(session.engine_id)
        _require_own_trainer(session, first_request.engine_secret)
        training = _unattended_training(session)
        training.is_trainer_connected = True
        session.wake_streams()
        _log.info("trainer_came", engine=session.engine_id, peer=context.peer())
        try:
            await self._serve(session, training, first_request, context)
        finally:
            training.is_trainer_connected = False
            session.wake_streams()
            _log.info("trainer_left", engine=session.engine_id)

    async def _serve(
        self,
        session: EngineSession,
        training: SelectiveTraining,
        request: training_pb2.AttendRequest | None,
        context: _Context,
    ) -> None:
        while request is not None:
            if session.end_error is not None:
                raise session.end_error
            if request.HasField("ended"):
                with error_field_prefix("ended"):
                    _end_round(session, training, training_result_from_proto(request.ended))
            order = training.record_stored_signals(request.stored_signals)
            session.wake_streams()
            # On disk before the trainer gets the order.
            await self._files.save_if_changed(session)
            await context.write(
                training_pb2.AttendResponse(
                    train_round=order,
                    draft_version=training.state.version,
                    phase=training.view.phase,
                    parent_version=training.state.parent,
                )
            )
            request = await read_message(context)


def _end_round(session: EngineSession, training: SelectiveTraining, result: TrainingResult) -> None:
    training.finish_round(result)
    session.counters.training_rounds[training.state.history[-1].outcome] += 1
    _log.info(
        "training_round",
        engine=session.engine_id,
        round=result.round,
        outcome=training.state.history[-1].outcome,
        version=result.version or None,
        alpha_train=round(result.alpha_train, 4),
        alpha_before=round(result.alpha_before, 4),
        alpha_eval=round(result.alpha_eval, 4),
        **({"error": result.error} if result.error else {}),
    )


def _require_own_trainer(session: EngineSession, secret: str) -> None:
    """Raises ForbiddenError if the caller is neither the engine's own trainer nor an operator."""
    caller = callers.current_caller()
    if Right.MEASURE in caller.rights or session.identity.is_same(
        EngineIdentity.from_caller(caller, secret)
    ):
        return
    raise ForbiddenError(
        f"this trainer does not belong to engine {session.engine_id!r}: start it with the engine's "
        "SPECULATION_SIGNALS_FOLDER, where the engine keeps its secret (engine.secret)",
        resource=session.engine_id,
    )


def _unattended_training(session: EngineSession) -> SelectiveTraining:
    training = session.core.updates.training
    if training is None:
        raise CannotTrainError(
            f"engine {session.engine_id!r} stores no training signals, or cannot load new versions "
            "of its drafter: start it with SPECULATION_SIGNALS_FOLDER",
            resource=session.engine_id,
        )
    if training.is_trainer_connected:
        raise TrainerAttachedError(
            f"another trainer is attached to engine {session.engine_id!r}",
            resource=session.engine_id,
        )
    return training
