"""Two engines, their agents and a sidecar, each a process that can be stopped or killed.

Everything of the product is real but three things: the clock (virtual), gRPC's wire (network.py)
and fork and exec (a process is an event loop that is turned, or is not).
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine_controller import EngineController
from controller.core.errors import SpeculationError
from controller.core.overrides import Override
from controller.core.profile import Profile
from controller.core.types import Arm, StepReport
from controller.core.types import EngineSpec as CoreSpec
from controller.service.converters import engine_from_proto
from controller.service.errors import NoSessionError
from controller.service.server import Sidecar
from controller.service.steering import SpeculationServicer
from controller.settings import Settings
from controller.store.port import Who
from engine_shim.link import agent as agent_module
from engine_shim.link import packets
from engine_shim.link.engine_link import EngineLink, steering_of
from engine_shim.link.engine_port import EnginePort
from engine_shim.link.packets import PlanPacket
from engine_shim.link.ranks import Ranks, Update
from engine_shim.link.settings import LinkSettings
from engine_shim.link.steering import Choice, Source, safe_choice
from speculation.v1.engine_pb2 import (
    DRAFTER_KIND_DFLASH,
    DRAFTER_KIND_MTP,
    Capabilities,
    Drafter,
    EngineSpec,
    Fingerprint,
)
from speculation.v1.service_pb2 import IntroduceResponse, SteerResponse
from tests.concurrency.ledger import Ledger, Step
from tests.concurrency.network import Channel, Network, Server
from tests.concurrency.virtual_time import VirtualLoop, in_virtual_time

GRACE_SECONDS: Final = 4.0
STEP_SECONDS: Final = 0.01
MAX_BATCH_SIZE: Final = 16
REPORT_BUFFER: Final = 24
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
_OPERATOR: Final = Who("operator", "a test", "unix:")


def specs() -> list[EngineSpec]:
    """One with two drafters, that can sleep and learn; one plain, of few batch buckets."""
    rich = EngineSpec(
        engine_id="rich",
        drafters=[
            Drafter(name="mtp", kind=DRAFTER_KIND_MTP, gammas=(0, 1, 3, 5)),
            Drafter(name="dflash", kind=DRAFTER_KIND_DFLASH, gammas=(0, 4, 7)),
        ],
        max_batch_size=MAX_BATCH_SIZE,
        capabilities=Capabilities(
            can_sleep=True, can_switch_drafter=True, can_update_online=True, can_collect=True
        ),
    )
    plain = EngineSpec(
        engine_id="plain",
        fingerprint=Fingerprint(graph_batch_sizes=(1, 8, 16)),
        drafters=[Drafter(name="mtp", kind=DRAFTER_KIND_MTP, gammas=(0, 1, 2, 3))],
        max_batch_size=MAX_BATCH_SIZE,
    )
    return [rich, plain]


class Agents:
    """Where the supervisor stands: hands out the sockets of agents that were started."""

    def __init__(self) -> None:
        self._fresh: deque[socket.socket] = deque()
        self.starts = 0
        self.agent_pid = None

    def add(self, ours: socket.socket) -> None:
        self._fresh.append(ours)
        self.starts += 1

    def take(self) -> socket.socket | None:
        newest = self._fresh.pop() if self._fresh else None
        while self._fresh:
            self._fresh.popleft().close()
        return newest

    def stop(self) -> None:
        while self._fresh:
            self._fresh.pop().close()


@dataclass(frozen=True)
class Commanded:
    """An override that was acknowledged, and the virtual time of its end."""

    override: Override
    until: float


class Process:
    """A process: it runs, or it is stopped, or it is dead."""

    def __init__(self, clock: VirtualClock) -> None:
        self.loop = VirtualLoop(clock)
        self.stopped = False


class AgentProcess(Process):
    """The real agent's main coroutine at one end of a real socket pair."""

    def __init__(self, clock: VirtualClock, theirs: socket.socket) -> None:
        super().__init__(clock)
        self.port: EnginePort | None = None
        options = agent_module._parse(
            [
                f"--fd={theirs.detach()}", "--parent=1", "--target=unix:controller.sock",
                f"--report-buffer={REPORT_BUFFER}",
            ]
        )  # fmt: skip
        self.main = self.loop.create_task(agent_module._serve(options))

    def kill(self) -> None:
        """The kernel closes what it held; nothing of it runs any more."""
        assert self.port is not None
        self.port._peer.close()
        self.stopped = True


class Engine:
    """Runs steps: one choice, one report each.  `ranks` of them adopt alike."""

    def __init__(self, spec: EngineSpec, ranks: int, clock: VirtualClock) -> None:
        self.spec = spec
        self._clock = clock
        settings = LinkSettings(sidecar="unix:controller.sock", grace_seconds=GRACE_SECONDS)
        steerings = [steering_of(spec, settings, 1) for _ in range(ranks)]
        self.agents = Agents()
        self.link = EngineLink(self.agents, steerings[0])  # type: ignore[arg-type]
        self._ranks = [Ranks(steering, None) for steering in steerings]
        self._ranks[0] = Ranks(steerings[0], self.link)
        self._steerings = steerings
        self._held_back: list[Update] = []
        # The newest plans that its steering took.
        self._taken: deque[PlanPacket] = deque(maxlen=4)
        # The newest plan that its agent had as packets were lost.
        self._missed: tuple[int, int] | None = None
        self.ledger = Ledger(spec, GRACE_SECONDS, safe_choice(1))
        self.agent: AgentProcess | None = None
        self.step = 0

    def choose(self, batch_size: int, lose_broadcast: bool) -> Choice:
        """Alike on all ranks, and as the ledger will have it."""
        if len(self._ranks) == 1:
            choice, judged_at = self.link.choose(batch_size), self._clock.now()
        else:
            updates = self._ranks[0].outgoing()
            if lose_broadcast:
                self._held_back = updates
            else:
                for rank in self._ranks:
                    for update in (*self._held_back, *updates):
                        rank.adopt(update)
                self._held_back = []
            choices = {rank.choose(batch_size) for rank in self._ranks}
            assert len(choices) == 1, f"the ranks differ: {choices}"
            choice, judged_at = choices.pop(), self._ranks[0]._adopted.now
        believed = self._steerings[0].plan
        self.ledger.chosen(choice, batch_size, judged_at, believed)
        if believed is not None:
            if believed not in self._taken:
                self._taken.append(believed)
            said = (believed.regime_mode, believed.regime_stride, believed.draft_version)
            assert said == self.ledger.regime(believed.session, believed.epoch)
        return choice

    def lose_packet(self) -> None:
        """The next packet for it, plan or event, is read by nobody."""
        peer = self.link._connected()
        if peer is not None:
            self._missed = self.ledger.newest_taken
            with contextlib.suppress(OSError):
                peer.recv(packets.MAX_PLAN_BYTES, socket.MSG_DONTWAIT)

    def repeat_packet(self, back: int) -> None:
        """A packet that was taken comes again: the newest, or one so many plans before it."""
        if self.agent is None or self.agent.port is None:
            return
        mine = [plan for plan in self._taken if plan.session == self.ledger.newest[0]]
        if mine:
            late = packets.encode_plan(mine[max(0, len(mine) - 1 - back)])
            with contextlib.suppress(OSError):
                self.agent.port._peer.send(late, socket.MSG_DONTWAIT)

    @property
    def is_up_to_date(self) -> bool:
        """Whether it has the newest plan that its agent took up, or cannot have it."""
        believed, newest = self.link.steering.plan, self.ledger.newest_taken
        reached = believed is not None and (believed.session, believed.epoch) == newest
        return reached or self.agent is None or newest in {self._missed, (0, 0)}

    def run(self, batch_size: int, accepted: int, lose_broadcast: bool = False) -> Choice:
        """One step; `accepted` draft tokens by each sequence, if so many were drafted."""
        choice = self.choose(batch_size, lose_broadcast)
        counts = [0] * (choice.gamma + 1)
        counts[min(accepted, choice.gamma)] = batch_size
        self.step += 1
        self.ledger.stepped(self.step, Step(choice, batch_size, tuple(counts)))
        self.link.report(
            self.step, batch_size, batch_size * 512, choice.drafter_index, choice.gamma, counts,
            STEP_SECONDS * (1 + 0.1 * choice.gamma),
            0 if choice.source is Source.PLAN else packets.UNSTEERED,
            choice.epoch, choice.probe_id, choice.session,
        )  # fmt: skip
        return choice


class WatchedSidecar(Sidecar):
    """Tells what its cores fold.  `loop`: its process's."""

    def __init__(
        self, settings: Settings, clock: VirtualClock, folded: Callable[[str, str, Any], None]
    ) -> None:
        self._folded = folded
        super().__init__(settings, clock)

    def _core(self, spec: CoreSpec, profile: Profile | None) -> EngineController:
        core = super()._core(spec, profile)
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
        self.loop.finish(self.sidecar.book.open())
        self.loop.create_task(self.sidecar._expire())
        self.server = Server(network, self.loop, SpeculationServicer(self.sidecar.registry))
        network.server = self.server

    def kill(self) -> None:
        """The kernel closes what it held; nothing of it runs any more."""
        self.stopped = True
        for channel in list(self._network.channels):
            self._network.cut(channel, 0)
        self._network.server = None
        self.sidecar.store._shut()  # type: ignore[attr-defined]

    @property
    def engine_ids(self) -> set[str]:
        """Engines that have a session."""
        return {session.engine_id for session in self.sidecar.registry}

    def part(self) -> None:
        """SIGTERM; it ends when that is done."""
        self.sidecar._server = self.sidecar._operators = self.server  # type: ignore[assignment]
        self.parting = self.loop.create_task(self.sidecar.stop())


class World:
    """Everything, and the clock."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock(1000.0)
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._dead: list[Process] = []
        self._stack.enter_context(in_virtual_time(self.clock))
        self._stack.enter_context(patch.object(agent_module, "EnginePort", self._port))
        self._stack.enter_context(patch.object(agent_module, "Credentials", self._credentials))
        self.network = Network(self._witness)
        # By id; kept here until long after their end.
        self.overrides: dict[str, Commanded] = {}
        self._changing: set[str] = set()
        self.engines = {
            spec.engine_id: Engine(spec, ranks, self.clock)
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
            engine.link.close()
        for process in (*self.processes, *self._dead):
            process.loop.end()
        self._stack.close()

    @property
    def processes(self) -> list[Process]:
        """Those that live, in the order in which they get their turns."""
        agents = [engine.agent for engine in self.engines.values()]
        return [process for process in (self.sidecar, *agents) if process is not None]

    # Time.

    def settle(self) -> None:
        """Lets everything go on that can without time going on."""
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
        """Lets time go on, timer by timer."""
        until = self.clock.now() + seconds
        self.settle()
        while (due := self._next_timer()) <= until:
            self.clock.advance(max(0.0, due - self.clock.now()) + _TICK_SECONDS)
            self.settle()
        self.clock.advance(max(0.0, until - self.clock.now()))
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

    def start_agent(self, engine: Engine) -> None:
        """With the introduction as its first packet."""
        assert engine.agent is None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        # Small enough to be full of reports, or of plans, within a few virtual seconds.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _OUT_BYTES)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_BYTES)
        said = EngineSpec(safe_gamma=1)
        said.MergeFrom(engine.spec)
        ours.send(packets.encode_hello(said.SerializeToString()))
        engine.agent = AgentProcess(self.clock, theirs)
        engine.agents.add(ours)

    def kill_agent(self, engine: Engine) -> None:
        """SIGKILL."""
        agent = engine.agent
        assert agent is not None
        for channel in [c for c in self.network.channels if c.engine == engine.spec.engine_id]:
            self.network.cut(channel, 0)
            self.network.channels.remove(channel)
        agent.kill()
        self._dead.append(agent)
        engine.agent = None

    def _port(self, *arguments: Any) -> EnginePort:
        engine = self._engine_here()
        assert engine.agent is not None
        engine.agent.port = port = EnginePort(*arguments)
        return port

    def _credentials(self, *_: str) -> Any:
        engine_id = self._engine_here().spec.engine_id
        return SimpleNamespace(
            channel=lambda _: Channel(self.network, engine_id), metadata=lambda: ()
        )

    def _engine_here(self) -> Engine:
        """Whose agent is having its turn."""
        here = asyncio.get_running_loop()
        return next(e for e in self.engines.values() if e.agent and e.agent.loop is here)

    # Overrides.

    def set_override(self, override: Override, seconds: float) -> None:
        """Through the book, as the policy service does; acknowledged on return."""
        assert self.sidecar is not None
        until = self.clock.now() + seconds
        self.overrides[override.override_id] = Commanded(override, until)
        self._changing.add(override.override_id)
        book = self.sidecar.sidecar.book
        self.sidecar.loop.finish(book.set(override, seconds, "", _OPERATOR))
        self._changing.discard(override.override_id)

    def clear_override(self, override_id: str) -> None:
        """As `set_override`."""
        assert self.sidecar is not None
        self._changing.add(override_id)
        self.sidecar.loop.finish(self.sidecar.sidecar.book.clear(override_id, "", _OPERATOR))
        self._changing.discard(override_id)
        del self.overrides[override_id]

    @property
    def in_force(self) -> list[str]:
        """Those that nobody can doubt."""
        soon = self.clock.now() + _EDGE_SECONDS
        return [name for name, commanded in self.overrides.items() if commanded.until > soon]

    def _in_force(self, spec: EngineSpec) -> tuple[set[str], set[str], int | None]:
        """(certainly, possibly in force, draft length that is left if that is certain)."""
        now = self.clock.now()
        certain, possible, pins = set(), set(), []
        for name, commanded in self.overrides.items():
            scope = commanded.override.scope
            if scope.name not in {"", spec.engine_id} or commanded.until < now - _EDGE_SECONDS:
                continue
            possible.add(name)
            ranged = commanded.override.min_batch_size or commanded.override.max_batch_size
            pins.append(None if ranged else commanded.override.rule.gamma)
            if commanded.until > now + _EDGE_SECONDS and name not in self._changing:
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
        session = self.sidecar.sidecar.registry.by_engine(engine_id)
        with session.measuring() as measurement:
            session.force(measurement, Arm("mtp", gamma))
            for _ in range(steps):
                self.advance(STEP_SECONDS)
                self.engines[engine_id].run(2, 1)

    def usurp(self, engine_id: str) -> None:
        """Its name is introduced by somebody else."""
        assert self.sidecar is not None

        registry = self.sidecar.sidecar.registry
        before = [s.session_id for s in registry if s.engine_id == engine_id]

        async def introduce() -> None:
            registry.introduce(engine_from_proto(self.engines[engine_id].spec))

        self.sidecar.loop.finish(introduce())
        for session_id in before:
            with pytest.raises(NoSessionError):
                registry.by_token(session_id)

    def age(self, engine_id: str, left: int) -> None:
        """Its session has made all plans and probes but so many."""
        assert self.sidecar is not None
        if engine_id in self.sidecar.engine_ids:
            core = self.sidecar.sidecar.registry.by_engine(engine_id).core
            core._epoch = max(core._epoch, _MOST_EPOCHS - left)
            core.explorer._next_id = max(core.explorer._next_id, _MOST_EPOCHS - left)

    # What the ledgers are told.

    def _witness(self, event: str, engine_id: str, session_id: str, message: Any) -> None:
        ledger = self.engines[engine_id].ledger
        if isinstance(message, IntroduceResponse):
            session_id = message.session_id
        if event == "read":
            if self._is_open(session_id):
                ledger.read(session_id, message.dropped_reports)
            return
        if event == "written":
            ledger.wrote(session_id, len(message.reports), message.dropped_reports)
            return
        if event == "taken" and isinstance(message, SteerResponse) and message.HasField("received"):
            ledger.had_received(session_id, message.received)
        if not message.HasField("plan"):
            assert not message.rejections, message
        elif event == "sent":
            in_force = self._in_force(self.engines[engine_id].spec)
            ledger.sent(session_id, message.plan, self.clock.now(), *in_force)
        else:
            ledger.taken(session_id, message.plan, self.clock.now())

    def _is_open(self, session_id: str) -> bool:
        """Nothing more is taken in for a session that is over."""
        assert self.sidecar is not None
        try:
            self.sidecar.sidecar.registry.by_token(session_id)
        except SpeculationError:
            return False
        return True

    def _folded(self, engine_id: str, session_id: str, report: StepReport) -> None:
        self.engines[engine_id].ledger.folded_by(session_id, report)

    def require_no_faults(self) -> None:
        """Nothing raised what it did not mean to."""
        for process in (*self.processes, *self._dead):
            assert not process.loop.faults, process.loop.faults
            if isinstance(process, SidecarProcess):
                faults = process.server.faults
                assert all(fault.startswith(_WORN_OUT) for fault in faults), faults
