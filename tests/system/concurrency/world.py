"""Two engines, their agents and a sidecar, each a process that can be stopped or killed.

Everything of the product is real but three things: the clock (virtual), gRPC's wire (network.py)
and fork and exec (a process is an event loop that is turned, or is not).
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from controller.core.planning.overrides import Override
from controller.core.step_report import StepReport
from controller.service.net.callers import Caller, Right
from controller.service.net.errors import NoSessionError
from controller.service.sessions.engine_identity import EngineIdentity
from controller.settings.settings import Settings
from controller.store.interface import Actor
from controller.wire.engines import engine_from_proto
from engine_shim.link import agent as agent_module
from engine_shim.link.agent_socket import AgentSocket
from speculation.v1.engine_pb2 import EngineSpec
from speculation.v1.service_pb2 import IntroduceRequest, IntroduceResponse
from tests.system.concurrency.engine import STEP_SECONDS, RankedEngine, specs
from tests.system.concurrency.network import Channel, Network
from tests.system.concurrency.processes import AgentProcess, Process, SidecarProcess
from tests.system.concurrency.virtual_time import in_virtual_time

_MOST_TURNS: Final = 5_000
# An override comes or goes within this time of its end, seconds.
_EDGE_SECONDS: Final = 1e-3
# Past a timer by more than rounding, as any real clock is.
_TICK_SECONDS: Final = 1e-6
_OUT_BYTES: Final = 24_000
_IN_BYTES: Final = 6_000
_MOST_EPOCHS: Final = 2**64 - 1
# What sending the plan after the last epoch raises: the stream ends, and a new session begins.
_WORN_OUT: Final = "ValueError('Value out of range: 1844674407370955"
_OPERATOR: Final = Actor("operator", "a test", "unix:")


@dataclass(frozen=True)
class Commanded:
    """An override that was acknowledged, and the virtual time of its end."""

    override: Override
    expires_at: float


class World:
    """Everything, and the clock."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock(1000.0)
        # All that happened, one line for each event: the same for the same course of events.
        self.trace: list[str] = []
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._dead: list[Process] = []
        self._stack.enter_context(in_virtual_time(self.clock))
        self._stack.enter_context(patch.object(agent_module, "AgentSocket", self._port))
        self._stack.enter_context(
            patch.object(agent_module, "EngineCredentials", self._credentials)
        )
        self.network = Network(self._witness)
        # By id; kept here until long after their end.
        self.overrides: dict[str, Commanded] = {}
        self._changing: set[str] = set()
        self.engines = {
            spec.engine_id: RankedEngine(spec, ranks, self.clock, self.note)
            for spec, ranks in zip(specs(), (3, 1), strict=True)
        }
        self.sidecar: SidecarProcess | None = None
        self.settings = Settings.load(
            {
                "address": f"unix:{directory}/controller.sock",
                "metrics_port": 0,
                "session_idle_seconds": 40.0,
                "last_lease_seconds": 8.0,
                "planner": {"lease_seconds": 2.0},
            }
        )
        self.start_sidecar()
        for engine in self.engines.values():
            self.start_agent(engine)

    def close(self) -> None:
        """Ends all of it."""
        for engine in self.engines.values():
            self.note("at the end", engine.spec.engine_id, engine.link.status())
            engine.link.close()
        for process in (*self.processes, *self._dead):
            process.loop.end()
        self._stack.close()

    def note(self, *event: object) -> None:
        """Adds an event to the trace."""
        self.trace.append(f"{self.clock.now()!r} {' '.join(map(str, event))}")

    @property
    def processes(self) -> list[Process]:
        """Those that live, in the order in which they get their turns."""
        agents = [engine.agent for engine in self.engines.values()]
        return [process for process in (self.sidecar, *agents) if process is not None]

    # Time.

    def settle(self) -> None:
        """Runs everything that can run before time advances."""
        turns = 0
        while True:
            moved = self.network.deliver()
            for process in self.processes:
                while not process.stopped and process.loop.turn():
                    moved, turns = True, turns + 1
                    assert turns < _MOST_TURNS, "the world does not come to rest"
            self._bury()
            if not moved:
                return

    def advance(self, seconds: float) -> None:
        """Advances time, timer by timer."""
        deadline = self.clock.now() + seconds
        self.settle()
        while (due := self._next_timer()) <= deadline:
            self.clock.advance(max(0.0, due - self.clock.now()) + _TICK_SECONDS)
            self.settle()
        self.clock.advance(max(0.0, deadline - self.clock.now()))
        self.settle()

    def _next_timer(self) -> float:
        running = (p.loop.next_timer for p in self.processes if not p.stopped)
        return min(running, default=float("inf"))

    def _bury(self) -> None:
        """Processes that ended by themselves."""
        for engine in self.engines.values():
            if engine.agent is not None and engine.agent.main.done():
                assert engine.agent.main.result() == 0
                self._dead.append(engine.agent)
                engine.agent = None
        sidecar = self.sidecar
        if sidecar is not None and sidecar.parting is not None and sidecar.parting.done():
            sidecar.parting.result()
            self.kill_sidecar()

    # Processes.

    def start_sidecar(self) -> None:
        """On the state that the one before left."""
        assert self.sidecar is None
        self.sidecar = SidecarProcess(self.clock, self.settings, self.network, self._folded)

    def kill_sidecar(self) -> None:
        """SIGKILL; or the end of one that has parted."""
        assert self.sidecar is not None
        self.sidecar.kill()
        self._dead.append(self.sidecar)
        self.sidecar = None
        for engine in self.engines.values():
            engine.ledger.died()

    def start_agent(self, engine: RankedEngine) -> None:
        """With the introduction as its first packet."""
        assert engine.agent is None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        # Small enough to be full of reports, or of plans, within a few virtual seconds.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _OUT_BYTES)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_BYTES)
        spec = EngineSpec(safe_gamma=1)
        spec.MergeFrom(engine.spec)
        introduction = IntroduceRequest(engine=spec, engine_secret=engine.spec.engine_id)
        ours.send(introduction.SerializeToString())
        engine.agent = AgentProcess(self.clock, theirs)
        engine.agents.add(ours)

    def kill_agent(self, engine: RankedEngine) -> None:
        """SIGKILL."""
        agent = engine.agent
        assert agent is not None
        for channel in [c for c in self.network.channels if c.engine == engine.spec.engine_id]:
            self.network.cut(channel, 0)
            self.network.channels.remove(channel)
        agent.kill()
        self._dead.append(agent)
        engine.agent = None

    def _port(self, *arguments: Any) -> AgentSocket:
        engine = self._engine_here()
        assert engine.agent is not None
        engine.agent.port = port = AgentSocket(*arguments)
        return port

    def _credentials(self, *_: str) -> Any:
        engine_id = self._engine_here().spec.engine_id
        return SimpleNamespace(
            channel=lambda _: Channel(self.network, engine_id), metadata=lambda: ()
        )

    def _engine_here(self) -> RankedEngine:
        """Whose agent is having its turn."""
        here = asyncio.get_running_loop()
        return next(e for e in self.engines.values() if e.agent and e.agent.loop is here)

    # Overrides.

    def set_override(self, override: Override, seconds: float) -> None:
        """Through the book, as the policy service does; acknowledged on return."""
        assert self.sidecar is not None
        expires_at = self.clock.now() + seconds
        self.overrides[override.override_id] = Commanded(override, expires_at)
        self._changing.add(override.override_id)
        override_registry = self.sidecar.sidecar.override_registry
        self.sidecar.loop.finish(override_registry.set_override(override, seconds, "", _OPERATOR))
        self._changing.discard(override.override_id)

    def clear_override(self, override_id: str) -> None:
        """As `set_override`."""
        assert self.sidecar is not None
        self._changing.add(override_id)
        self.sidecar.loop.finish(
            self.sidecar.sidecar.override_registry.clear_override(override_id, "", _OPERATOR)
        )
        self._changing.discard(override_id)
        del self.overrides[override_id]

    @property
    def active_override_ids(self) -> list[str]:
        """Those that are certain."""
        soon = self.clock.now() + _EDGE_SECONDS
        return [name for name, commanded in self.overrides.items() if commanded.expires_at > soon]

    def _in_force(self, spec: EngineSpec) -> tuple[set[str], set[str], int | None]:
        """(certainly, possibly in force, draft length that is left if that is certain)."""
        now = self.clock.now()
        certain, possible, pins = set(), set(), []
        for name, commanded in self.overrides.items():
            scope = commanded.override.scope
            if scope.name not in {"", spec.engine_id} or commanded.expires_at < now - _EDGE_SECONDS:
                continue
            possible.add(name)
            ranged = commanded.override.min_batch_size or commanded.override.max_batch_size
            pins.append(None if ranged else commanded.override.rule.gamma)
            if commanded.expires_at > now + _EDGE_SECONDS and name not in self._changing:
                certain.add(name)
        alone = len(pins) == 1 and certain == possible
        return certain, possible, pins[0] if alone else None

    def reload(self, settings: Settings) -> None:
        """SIGHUP."""
        assert self.sidecar is not None
        sidecar = self.sidecar.sidecar
        work = sidecar._reloader.reload(sidecar._settings, lambda: settings)
        self.settings = sidecar._settings = self.sidecar.loop.finish(work)

    def measure(self, engine_id: str, gamma: int, steps: int) -> None:
        """As the profiling service: the engine runs one arm for a while."""
        assert self.sidecar is not None
        if engine_id not in self.sidecar.engine_ids:
            return
        session = self.sidecar.sidecar.registry.find_by_engine(engine_id)
        with session.reserve_for_measurement() as measurement:
            session.force_arm(measurement, Arm("mtp", gamma))
            for _ in range(steps):
                self.advance(STEP_SECONDS)
                self.engines[engine_id].run(2, 1)

    def usurp(self, engine_id: str) -> None:
        """It is introduced once more, as by a second agent of the same engine."""
        assert self.sidecar is not None

        registry = self.sidecar.sidecar.registry
        before = [s.session_id for s in registry if s.engine_id == engine_id]

        async def introduce() -> None:
            holder = EngineIdentity.from_caller(Caller("a second agent", Right.STEER), engine_id)
            registry.introduce(engine_from_proto(self.engines[engine_id].spec), holder)

        self.sidecar.loop.finish(introduce())
        for session_id in before:
            with pytest.raises(NoSessionError):
                registry.find_by_token(session_id)

    def age(self, engine_id: str, left: int) -> None:
        """Its session has made all plans and probes but `left`."""
        assert self.sidecar is not None
        if engine_id in self.sidecar.engine_ids:
            core = self.sidecar.sidecar.registry.find_by_engine(engine_id).core
            core._epoch = max(core._epoch, _MOST_EPOCHS - left)
            core.explorer._next_probe_id = max(core.explorer._next_probe_id, _MOST_EPOCHS - left)

    def has_epochs_left(self, engine_id: str) -> bool:
        """Whether its session can make another plan."""
        assert self.sidecar is not None
        core = self.sidecar.sidecar.registry.find_by_engine(engine_id).core
        return core._epoch < _MOST_EPOCHS

    # What the ledgers record.

    def _witness(self, event: str, engine_id: str, session_id: str, message: Any) -> None:
        ledger = self.engines[engine_id].ledger
        self.note(event, engine_id, session_id, message.SerializeToString(deterministic=True).hex())
        if event == "taken":
            last = "received" if isinstance(message, IntroduceResponse) else "received_so_far"
            if message.HasField(last):
                ledger.acknowledged(session_id, getattr(message, last))
        if isinstance(message, IntroduceResponse):
            session_id = message.session_id
        if event == "read":
            if self._is_open(session_id):
                ledger.read(session_id, message.dropped_reports)
            return
        if not message.HasField("plan"):
            assert isinstance(message, IntroduceResponse) or not message.rejections, message
        elif event == "sent":
            in_force = self._in_force(self.engines[engine_id].spec)
            ledger.sent(session_id, message.plan, self.clock.now(), *in_force)
        else:
            ledger.taken(session_id, message.plan, self.clock.now())

    def _is_open(self, session_id: str) -> bool:
        """Nothing more is taken in for a session that is over."""
        assert self.sidecar is not None
        try:
            self.sidecar.sidecar.registry.find_by_token(session_id)
        except SpeculationError:
            return False
        return True

    def _folded(self, engine_id: str, session_id: str, report: StepReport) -> None:
        self.note("folded", engine_id, session_id, report)
        self.engines[engine_id].ledger.folded_by(session_id, report)

    def require_no_faults(self) -> None:
        """Nothing raised what it did not mean to."""
        for process in (*self.processes, *self._dead):
            assert not process.loop.faults, process.loop.faults
            if isinstance(process, SidecarProcess):
                faults = process.server.faults
                assert all(fault.startswith(_WORN_OUT) for fault in faults), faults
