"""Serves the InspectionService, with lists of engines and explanations of plans."""

import time
from dataclasses import InitVar, asdict, dataclass

import controller
from controller.core.engine_spec import MAX_BATCH_SIZE
from controller.service.net.errors import Context, InvalidQuestionError
from controller.service.net.limits import FairQueue
from controller.service.rpc.overrides import held_override_to_proto
from controller.service.rpc.store_messages import health_to_proto
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.override_registry import OverrideRegistry
from controller.service.views.fleet_filter import FleetSearch, engine_values
from controller.service.views.fleet_view import FleetView
from controller.service.views.paging import ROWS_MAX, page_of
from controller.service.views.readiness import Readiness
from controller.service.views.status_cache import StatusCache
from controller.wire.engines import engine_to_proto
from controller.wire.explanations import (
    Explanation,
    explain,
    explanation_to_proto,
    warning_to_proto,
)
from controller.wire.field_mapping import message_of
from controller.wire.plans import plan_to_proto
from controller.wire.reports import report_to_proto
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc


@dataclass(eq=False, repr=False)
class InspectionServicer(service_pb2_grpc.InspectionServiceServicer):
    """Serves ListEngines, Explain, Overview and ListFleet.

    read_queue: the queue of calls that read on the same server.
    """

    registry: SessionRegistry
    override_registry: OverrideRegistry
    readiness: Readiness
    status_cache: StatusCache
    fleet_view: InitVar[FleetView]
    read_queue: FairQueue

    def __post_init__(self, fleet_view: FleetView) -> None:
        self._fleet_search = FleetSearch(fleet_view, self.read_queue)
        self._started_at, self._started_monotonic = time.time(), time.monotonic()

    async def ListEngines(
        self, request: service_pb2.ListEnginesRequest, context: Context
    ) -> service_pb2.ListEnginesResponse:
        """Returns a page of the sessions, ordered by engine id, and the sidecar's status."""
        sessions = {session.engine_id: session for session in self.registry}
        rows, token = await page_of(
            self.read_queue,
            sessions,
            lambda engine_id: self._status(sessions[engine_id]),
            _unavailable_status,
            request.page_size,
            request.page_token,
        )
        return service_pb2.ListEnginesResponse(
            engines=rows,
            next_page_token=token,
            sidecar=service_pb2.SidecarStatus(
                version=controller.__version__,
                started_at_unix_seconds=self._started_at,
                now_unix_seconds=time.time(),
                uptime_seconds=time.monotonic() - self._started_monotonic,
                services=self._health(),
            ),
        )

    async def Explain(
        self, request: service_pb2.ExplainRequest, context: Context
    ) -> service_pb2.ExplainResponse:
        """Explains the decision of one engine at one batch size."""
        if request.batch_size > MAX_BATCH_SIZE:
            raise InvalidQuestionError(
                f"batch_size {request.batch_size} must be in [0, {MAX_BATCH_SIZE}] "
                "(0: that of the last report)",
                field_path="batch_size",
            )
        explanation, answer = await self.read_queue.run(lambda: self._explain(request))
        override_ids = {override.override_id for override in explanation.overrides}
        answer.overrides.extend(
            held_override_to_proto(active)
            for active in self.override_registry.list_active()
            if active.override.override_id in override_ids
        )
        answer.store.CopyFrom(health_to_proto(self.override_registry.health))
        answer.services.extend(self._health())
        return answer

    def _explain(
        self, request: service_pb2.ExplainRequest
    ) -> tuple[Explanation, service_pb2.ExplainResponse]:
        session = self.registry.find_by_engine(request.engine_id)
        explanation = explain(session.core, request.batch_size)
        return explanation, explanation_to_proto(explanation)

    async def Overview(
        self, request: service_pb2.OverviewRequest, context: Context
    ) -> service_pb2.OverviewResponse:
        """Returns a page of the engines, each in one line."""
        lines = {line.engine_id: line for line in await self.status_cache.lines()}
        rows, token = await page_of(
            self.read_queue,
            lines,
            lambda engine_id: service_pb2.EngineOverview(**asdict(lines[engine_id])),
            _unavailable_line,
            request.page_size,
            request.page_token,
        )
        return service_pb2.OverviewResponse(
            engines=rows, version=controller.__version__, next_page_token=token
        )

    async def ListFleet(
        self, request: service_pb2.ListFleetRequest, context: Context
    ) -> service_pb2.ListFleetResponse:
        """Returns a page of the engines of all sidecars that share the store."""
        selection = await self._fleet_search.select(request.filter)
        # One more than the page, to know whether another page follows.
        engines = selection.engines_after(request.page_token, ROWS_MAX + 1)
        by_key = {engine.key: engine for engine in engines}
        rows, token = await page_of(
            self.read_queue,
            by_key,
            lambda key: service_pb2.FleetEngine(**engine_values(by_key[key])),
            _unavailable_fleet_engine,
            request.page_size,
            request.page_token,
        )
        fleet = selection.fleet
        return service_pb2.ListFleetResponse(
            engines=rows,
            next_page_token=token,
            totals=service_pb2.FleetTotals(**asdict(selection.totals)),
            shared=fleet.shared,
            trouble=fleet.trouble,
            refused=fleet.refused,
            left_out=fleet.left_out,
            version=controller.__version__,
        )

    def _health(self) -> list[service_pb2.ServiceHealth]:
        return [
            message_of(service_pb2.ServiceHealth, health) for health in self.readiness.services()
        ]

    def _status(self, session: EngineSession) -> service_pb2.EngineStatus:
        last_report, counters, core = session.last_report, session.counters, session.core
        return service_pb2.EngineStatus(
            engine=engine_to_proto(session.spec),
            plan=plan_to_proto(session.plan),
            profile_id=core.profile_id,
            reports=counters.reports,
            rejected_reports=counters.rejected.total(),
            dropped_reports=counters.dropped_reports,
            last_report=None if last_report is None else report_to_proto(last_report),
            seconds_since_last_report=session.seconds_since_last_report,
            costs="profile" if core.profile_id else core.cost_model.prior,
            no_profile=""
            if core.profile_id
            else self.readiness.missing_profile_reason(session.spec),
            steering=session.open_streams > 0,
            unsteered_steps=counters.unsteered_steps,
            warnings=map(warning_to_proto, core.checks.warnings()),
        )


def _unavailable_status(engine_id: str, reason: str) -> service_pb2.EngineStatus:
    engine = engine_pb2.EngineSpec(engine_id=engine_id)
    return service_pb2.EngineStatus(engine=engine, unavailable=reason)


def _unavailable_line(engine_id: str, reason: str) -> service_pb2.EngineOverview:
    return service_pb2.EngineOverview(engine_id=engine_id, unavailable=reason)


def _unavailable_fleet_engine(key: str, reason: str) -> service_pb2.FleetEngine:
    return service_pb2.FleetEngine(engine_id=key.partition(" ")[0], unavailable=reason)
