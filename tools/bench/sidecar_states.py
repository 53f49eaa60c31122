"""Sidecars of a fleet without their gRPC servers: many of them fit into one process."""

from controller.core.clock import WallClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.settings import PlannerSettings
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.override_registry import OverrideRegistry
from controller.service.state.profile_registry import ProfileRegistry
from controller.store.redis_store import RedisStore
from controller.util.tasks import Supervisor
from tests.support.virtual_engine import engine_spec


class State:
    """The state of one sidecar: its store, overrides, and the sessions of its engines."""

    def __init__(self, url: str, number: int, engines: int) -> None:
        clock = WallClock()

        def core(spec: EngineSpec, profile: Profile | None) -> EngineController:
            return EngineController(spec, PlannerSettings(), profile, clock)

        self.profiles = ProfileRegistry()
        self.store = RedisStore(url)
        self.registry = SessionRegistry(core, self.profiles, clock)
        self.override_registry = OverrideRegistry(self.store, self.registry)
        self.supervisor = Supervisor()
        for engine in range(engines):
            spec = engine_spec()
            self.registry.introduce(
                EngineSpec(
                    f"pod-{number}-{engine}", spec.fingerprint, spec.drafters, spec.max_batch_size
                )
            )

    async def open(self) -> None:
        """Opens the store and begins to keep the overrides."""
        await self.override_registry.open()
        self.supervisor.run_all({"overrides": self.override_registry.run, **self.store.tasks})

    async def close(self) -> None:
        """Ends all tasks and closes the store."""
        await self.supervisor.stop()
        await self.override_registry.close()

    def obeys(self, override_id: str) -> bool:
        """Every engine's plan names the override."""
        return all(override_id in session.plan.overrides for session in self.registry)
