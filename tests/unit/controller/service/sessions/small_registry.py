"""A registry of sessions with few places."""

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.settings import PlannerSettings
from controller.service.net.callers import Caller, Right
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.profile_registry import ProfileRegistry
from controller.wire.engines import engine_from_proto
from tests.support.service_harness import engine_message

ANYBODY = Caller("a client of the socket", Right.STEER)


def spec(engine_id: str = "engine-0") -> EngineSpec:
    return engine_from_proto(engine_message(engine_id))


def registry(
    clock: VirtualClock | None = None,
    profiles: ProfileRegistry | None = None,
    max_engines: int = 3,
    idle_seconds: float = 100.0,
) -> SessionRegistry:
    clock = clock or VirtualClock()
    return SessionRegistry(
        lambda spec, profile: EngineController(spec, PlannerSettings(), profile, clock),
        profiles or ProfileRegistry(),
        clock,
        max_engines,
        idle_seconds,
    )
