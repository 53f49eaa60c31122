"""Serves the TrainingService, which attaches a trainer to an engine and processes its results."""

from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio
import structlog

from controller.core.errors import within
from controller.core.training.selective_training import SelectiveTraining, TrainingResult
from controller.service.net import callers
from controller.service.net.callers import Right
from controller.service.net.errors import (
    CannotTrainError,
    ForbiddenError,
    TrainerAttachedError,
)
from controller.service.rpc import streams
from controller.service.rpc.streams import read
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.training_state import TrainingStateFiles
from controller.wire.reports import result_from_proto
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
        first = await streams.first(context)
        if first is None:
            return
        session = self._registry.by_engine(first.engine_id)
        callers.require_engine(session.engine_id)
        _require_own(session, first.engine_secret)
        training = _free(session)
        training.attended = True
        session.ring()
        _log.info("trainer_came", engine=session.engine_id, peer=context.peer())
        try:
            await self._serve(session, training, first, context)
        finally:
            training.attended = False
            session.ring()
            _log.info("trainer_left", engine=session.engine_id)

    async def _serve(
        self,
        session: EngineSession,
        training: SelectiveTraining,
        request: training_pb2.AttendRequest | None,
        context: _Context,
    ) -> None:
        while request is not None:
            if session.ended is not None:
                raise session.ended
            if request.HasField("ended"):
                with within("ended"):
                    _end_round(session, training, result_from_proto(request.ended))
            order = training.keep(request.stored_signals)
            session.ring()
            # On disk before the trainer gets the order.
            await self._files.keep(session)
            await context.write(
                training_pb2.AttendResponse(
                    train_round=order,
                    draft_version=training.state.version,
                    phase=training.view.phase,
                    parent_version=training.state.parent,
                )
            )
            request = await read(context)


def _end_round(session: EngineSession, training: SelectiveTraining, result: TrainingResult) -> None:
    training.trained(result)
    session.counters.rounds[training.state.history[-1].outcome] += 1
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


def _require_own(session: EngineSession, secret: str) -> None:
    """Raises ForbiddenError if the caller is neither the engine's own trainer nor an operator."""
    caller = callers.calling()
    if Right.MEASURE in caller.rights or session.identity.is_same(
        EngineIdentity.of(caller, secret)
    ):
        return
    raise ForbiddenError(
        f"this trainer does not belong to engine {session.engine_id!r}: start it with the engine's "
        "SPECULATION_SIGNALS_FOLDER, where the engine keeps its secret (engine.secret)",
        resource=session.engine_id,
    )


def _free(session: EngineSession) -> SelectiveTraining:
    training = session.core.updates.training
    if training is None:
        raise CannotTrainError(
            f"engine {session.engine_id!r} stores no training signals, or cannot load new versions "
            "of its drafter: start it with SPECULATION_SIGNALS_FOLDER",
            resource=session.engine_id,
        )
    if training.attended:
        raise TrainerAttachedError(
            f"another trainer is attached to engine {session.engine_id!r}",
            resource=session.engine_id,
        )
    return training
