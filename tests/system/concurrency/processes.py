"""An agent and a sidecar as processes that are stopped or killed: event loops in virtual time."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from controller.core.clock import VirtualClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.step_report import StepReport
from controller.service.rpc.steering import SpeculationServicer
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from engine_shim.link import agent as agent_module
from engine_shim.link.agent_socket import AgentSocket
from tests.system.concurrency.network import Network, Server
from tests.system.concurrency.virtual_time import VirtualLoop

_REPORT_BUFFER: Final = 24


class Process:
    """A process: it runs, or it is stopped, or it is dead."""

    def __init__(self, clock: VirtualClock) -> None:
        self.loop = VirtualLoop(clock)
        self.stopped = False


class AgentProcess(Process):
    """The real agent's main coroutine at one end of a real socket pair."""

    def __init__(self, clock: VirtualClock, theirs: socket.socket) -> None:
        super().__init__(clock)
        self.port: AgentSocket | None = None
        options = agent_module._parse(
            [
                f"--fd={theirs.detach()}", "--parent=1", "--target=unix:controller.sock",
                f"--report-buffer={_REPORT_BUFFER}",
            ]
        )  # fmt: skip
        self.main = self.loop.create_task(agent_module._serve(options))

    def kill(self) -> None:
        """The kernel closes what it held; it no longer runs."""
        assert self.port is not None
        self.port._peer.close()
        self.stopped = True


class WatchedSidecar(Sidecar):
    """Tells what its cores fold.  `loop`: its process's."""

    def __init__(
        self, settings: Settings, clock: VirtualClock, folded: Callable[[str, str, Any], None]
    ) -> None:
        self._folded = folded
        super().__init__(settings, clock)

    def _make_core(self, spec: EngineSpec, profile: Profile | None) -> EngineController:
        core = super()._make_core(spec, profile)
        fold = core.observe

        def observe(report: StepReport) -> None:
            fold(report)
            session = next(s for s in self.registry if s.core is core)
            self._folded(spec.engine_id, session.session_id, report)

        core.observe = observe  # type: ignore[method-assign]
        return core


class SidecarProcess(Process):
    """The real sidecar but for its sockets."""

    def __init__(
        self,
        clock: VirtualClock,
        settings: Settings,
        network: Network,
        folded: Callable[[str, str, Any], None],
    ) -> None:
        super().__init__(clock)
        self._network = network
        self.parting: asyncio.Task[None] | None = None
        self.sidecar = WatchedSidecar(settings, clock, folded)
        self.loop.finish(self.sidecar.override_registry.open())
        self.loop.create_task(self.sidecar.override_registry.run())
        self.loop.create_task(self.sidecar._expire_sessions())
        self.server = Server(network, self.loop, SpeculationServicer(self.sidecar.registry))
        network.server = self.server

    def kill(self) -> None:
        """The kernel closes what it held; it no longer runs."""
        self.stopped = True
        for channel in list(self._network.channels):
            self._network.cut(channel, 0)
        self._network.server = None
        self.sidecar.store._close_files()  # type: ignore[attr-defined]

    @property
    def engine_ids(self) -> set[str]:
        """Engines that have a session."""
        return {session.engine_id for session in self.sidecar.registry}

    def part(self) -> None:
        """SIGTERM; it ends when that is done."""
        self.sidecar._servers._servers = [self.server]  # type: ignore[list-item]
        self.parting = self.loop.create_task(self.sidecar.stop())
