"""What people ask: which engines are steered, and why this plan."""

import grpc.aio

from controller.core.errors import SpeculationError
from controller.core.types import MAX_BATCH_SIZE
from controller.service import converters
from controller.service.errors import InvalidQuestionError, abort
from controller.service.override_book import OverrideBook
from controller.service.override_messages import health_to_proto
from controller.service.policy import held_to_proto
from controller.service.session import Session
from controller.service.sessions import SessionRegistry
from speculation.v1 import service_pb2, service_pb2_grpc


class InspectionServicer(service_pb2_grpc.InspectionServiceServicer):
    """ListEngines, Explain."""

    def __init__(self, registry: SessionRegistry, book: OverrideBook) -> None:
        self._registry = registry
        self._book = book

    async def ListEngines(
        self,
        request: service_pb2.ListEnginesRequest,
        context: grpc.aio.ServicerContext[
            service_pb2.ListEnginesRequest, service_pb2.ListEnginesResponse
        ],
    ) -> service_pb2.ListEnginesResponse:
        """Every session, by engine id."""
        sessions = sorted(self._registry, key=lambda session: session.engine_id)
        return service_pb2.ListEnginesResponse(engines=map(_status, sessions))

    async def Explain(
        self,
        request: service_pb2.ExplainRequest,
        context: grpc.aio.ServicerContext[service_pb2.ExplainRequest, service_pb2.ExplainResponse],
    ) -> service_pb2.ExplainResponse:
        """The decision row of one engine at one batch size."""
        try:
            if request.batch_size > MAX_BATCH_SIZE:
                raise InvalidQuestionError(
                    f"batch_size {request.batch_size} leaves 0..{MAX_BATCH_SIZE} "
                    "(0: that of the last report)"
                )
            session = self._registry.by_engine(request.engine_id)
            explanation = session.core.explain(request.batch_size)
            answer = converters.explanation_to_proto(explanation)
            mine = {override.override_id for override in explanation.overrides}
            answer.overrides.extend(
                held_to_proto(held)
                for held in self._book.held()
                if held.override.override_id in mine
            )
            answer.store.CopyFrom(health_to_proto(self._book.health))
            return answer
        except SpeculationError as error:
            await abort(context, error)


def _status(session: Session) -> service_pb2.EngineStatus:
    last, tally = session.last_report, session.tally
    return service_pb2.EngineStatus(
        engine=converters.engine_to_proto(session.spec),
        plan=converters.plan_to_proto(session.plan),
        profile_id=session.core.profile_id,
        reports=tally.reports,
        rejected_reports=tally.rejected.total(),
        dropped_reports=tally.dropped,
        last_report=None if last is None else converters.report_to_proto(last),
        seconds_since_last_report=session.seconds_since_last_report,
    )
