"""Decides which services are SERVING (grpc.health.v1), and explains why one is not.

    ""                        the process; SERVING from the end of its start to the drain, while
                              its socket files exist
    SpeculationService        once costs come from the source that the setting `ready_with` requires
    speculation.store         while the store of overrides can be used
    all others                as ""

A service whose task has failed is NOT_SERVING until the task runs again (`_SERVICES_BY_TASK`).

A service that is NOT_SERVING still answers: engines are steered (by the prior), so that
`controller profile` can measure them.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import structlog
from grpc_health.v1 import health, health_pb2

from controller.core.engine_spec import EngineSpec
from controller.service.net.unix_sockets import OperatorSocket
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.override_registry import OverrideRegistry
from controller.service.state.profile_registry import ProfileRegistry
from controller.util.tasks import Supervisor
from speculation.v1 import policy_pb2, service_pb2, training_pb2

SERVICES = tuple(
    service.full_name
    for module in (service_pb2, policy_pb2, training_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)
STEERING = service_pb2.DESCRIPTOR.services_by_name["SpeculationService"].full_name
POLICY = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].full_name
INSPECTION = service_pb2.DESCRIPTOR.services_by_name["InspectionService"].full_name
TRAINING = training_pb2.DESCRIPTOR.services_by_name["TrainingService"].full_name
# The name of the store of overrides in grpc.health.v1.
STORE = "speculation.store"
# The services that depend on each task (`Sidecar._tasks`); "" means all services.  Only tasks that
# the whole sidecar needs have "": an orchestrator restarts a sidecar if "" is NOT_SERVING.
_SERVICES_BY_TASK: Final = {
    "readiness": ("",),
    "expiry": ("",),
    "load": ("",),
    "access_list": ("",),
    "overrides": (POLICY, STORE),
    "store_news": (POLICY, STORE),
    "store_counter": (POLICY, STORE),
    "policy_file": (POLICY,),
    "audit_counts": (POLICY,),
    "training_state": (TRAINING,),
}
_DEFAULT_SERVICES: Final = (INSPECTION,)

_UPDATE_SECONDS = 0.5
_COST_SOURCE_RANKS = {"profile": 2, "roofline": 1, "guess": 0}
# Engines that a message names.
_NAMED_MAX = 3

_log = structlog.get_logger(__name__)

CostSource = Literal["profile", "roofline", "guess"]


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """Holds the state of one service; detail: the reason, for people."""

    service: str
    serving: bool
    detail: str


@dataclass(eq=False, repr=False)
class Readiness:
    """Decides on readiness.

    ready_with: the lowest acceptable source of costs.  servicer: answers health checks.
    """

    registry: SessionRegistry
    profiles: ProfileRegistry
    override_registry: OverrideRegistry
    operator_socket: OperatorSocket
    ready_with: CostSource
    supervisor: Supervisor

    def __post_init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._started = False

    def services(self) -> tuple[ServiceHealth, ...]:
        """Returns the present health of every service."""
        return tuple(self._services())

    def missing_profile_reason(self, spec: EngineSpec) -> str:
        """Explains why no profile matches an engine."""
        return self.profiles.missing_profile_reason(spec)

    async def finish_start(self) -> None:
        """Marks the end of the sidecar's start."""
        self._started = True
        await self.update_servicer()

    async def update_servicer(self) -> None:
        """Updates the servicer with the present health of the services."""
        status = health_pb2.HealthCheckResponse
        for service_health in self._services():
            await self.servicer.set(
                service_health.service,
                status.SERVING if service_health.serving else status.NOT_SERVING,
            )

    async def watch(self) -> None:
        """Updates the servicer periodically, until cancelled."""
        logged_fault = ""
        try:
            while True:
                await self.update_servicer()
                if (fault := self.operator_socket.missing_files_reason) != logged_fault:
                    logged_fault = fault
                    _log.error("sockets_lost", detail=fault)
                await asyncio.sleep(_UPDATE_SECONDS)
        finally:
            # Without this task the health is unknown.
            for name in ("", *SERVICES, STORE):
                await self.servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop_serving(self) -> None:
        """Sets all services to NOT_SERVING permanently."""
        self._started = False
        await self.servicer.enter_graceful_shutdown()

    def _services(self) -> Iterator[ServiceHealth]:
        general = self._general_fault()
        faults = {"": general} | {
            name: "; ".join(filter(None, (general, self._task_fault(name))))
            for name in (*SERVICES, STORE)
        }
        faults[STEERING] = faults[STEERING] or self._steering_fault()
        store = self.override_registry.health
        for name, fault in faults.items():
            if name == STORE and not fault:
                yield ServiceHealth(name, store.ok, store.detail)
            else:
                yield ServiceHealth(name, not fault, fault)

    def _general_fault(self) -> str:
        """Explains why no service is SERVING; "" if some may be."""
        if not self._started:
            return "the sidecar is starting or stopping"
        return self.operator_socket.missing_files_reason or self._task_fault("")

    def _task_fault(self, service: str) -> str:
        """Explains which of a service's tasks are down; "" if all run."""
        return "; ".join(
            f"the task {name} has failed ({fault}) and is started again: see the log"
            for name, fault in self.supervisor.faults().items()
            if service in _SERVICES_BY_TASK.get(name, _DEFAULT_SERVICES)
        )

    def _steering_fault(self) -> str:
        """Explains why the required source of costs is missing; "" if it is available."""
        required_rank = _COST_SOURCE_RANKS[self.ready_with]
        lacking = [
            session for session in self.registry if _cost_source_rank(session) < required_rank
        ]
        if lacking:
            names = ", ".join(session.engine_id for session in lacking[:_NAMED_MAX])
            more_text = (
                f" and {len(lacking) - _NAMED_MAX} more" if len(lacking) > _NAMED_MAX else ""
            )
            first_session = lacking[0]
            return (
                f"engine {names}{more_text}: costs are a {first_session.core.cost_model.prior} "
                "prior, and ready_with "
                f"requires a {self.ready_with}; "
                f"{self.profiles.missing_profile_reason(first_session.spec)}"
            )
        if required_rank and not len(self.registry) and not len(self.profiles):
            return "no engine has introduced itself, and no profile is loaded"
        return ""


def _cost_source_rank(session: EngineSession) -> int:
    if session.core.profile_id:
        return _COST_SOURCE_RANKS["profile"]
    return _COST_SOURCE_RANKS[
        "roofline" if session.core.cost_model.prior == "roofline" else "guess"
    ]
