"""A machine of hypothesis that deals events to two engines, their agents and a sidecar.

The ledger judges every choice, plan and report as it happens (see there for what must hold).  At
the end of each run, when all processes run and the network moves, the engines must be steered by
the newest plan, and every report must have been used or told as lost.
"""

import tempfile
from pathlib import Path
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from controller.core.plan import Regime, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.settings.settings import Settings
from tests.system.concurrency.engine import STEP_SECONDS, RankedEngine
from tests.system.concurrency.processes import Process
from tests.system.concurrency.world import World

# Longer than any lease, silence and wait of the link.
_PATIENCE_SECONDS: Final = 60.0

ENGINES = st.sampled_from(["rich", "plain"])
WAITS = st.sampled_from([0.001, 0.02, 0.1, 0.3, 1.0, 2.1, 5.0, 7.0, 45.0])
RULES = st.sampled_from(
    [
        *(Rule(gamma=gamma) for gamma in (0, 1, 3)),
        Rule(gamma_min=2), Rule(gamma_max=1), Rule(off=True), Rule(deny_exploration=True),
        Rule(tpot_max_seconds=0.001), Rule(tpot_max_seconds=0.02),
        Rule(drafter="mtp"), Rule(deny_drafters=("mtp",)), Rule(deny_updates=True),
        Rule(regime=Regime(RegimeMode.ONLINE, 5)), Rule(regime=Regime(RegimeMode.COLLECT)),
    ]
)  # fmt: skip
SCOPES = st.sampled_from(
    [
        Scope(ScopeKind.FLEET),
        Scope(ScopeKind.ENGINE, "rich"),
        Scope(ScopeKind.ENGINE, "plain"),
    ]
)
PLANNERS = st.fixed_dictionaries(
    {
        "lease_seconds": st.sampled_from([0.2, 2.0, 6.0]),
        "probe_share": st.sampled_from([0.0, 0.009, 0.2]),
        "replan_seconds": st.sampled_from([0.001, 0.07]),
    }
)


class Link(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.world = World(Path(self._directory.name))
        self._overrides_made = 0
        # Engines whose agents were killed: what those held is lost.
        self._bereft: set[str] = set()

    @initialize(settled=st.booleans(), rule=st.none() | RULES, count=st.sampled_from([0, 20, 60]))
    def begin(self, settled: bool, rule: Rule | None, count: int) -> None:
        """Under an override or none, and with something learnt or nothing."""
        if rule is not None:
            first = Override("first", Scope(ScopeKind.FLEET), rule, "operator", "a test")
            self.world.set_override(first, 30.0)
        if settled:
            self.world.settle()
        for _ in range(count):
            self.both_step(accepted=2, count=1)

    # The engines.

    @rule(
        engine=ENGINES,
        count=st.sampled_from([1, 3, 12, 40]),
        batch_size=st.sampled_from([1, 2, 4, 9, 16, 40]),
        accepted=st.integers(0, 5),
        every=st.sampled_from([1, 1, 5, 100]),
    )
    def step(self, engine: str, count: int, batch_size: int, accepted: int, every: int) -> None:
        """`count` steps; the others get their turns after every few of them."""
        for number in range(1, count + 1):
            self.world.engines[engine].run(batch_size, accepted)
            if number % every == 0:
                self.world.advance(STEP_SECONDS)

    @rule(accepted=st.integers(0, 3), count=st.integers(1, 6))
    def both_step(self, accepted: int, count: int) -> None:
        for _ in range(count):
            for engine in self.world.engines.values():
                engine.run(4, accepted)
            self.world.advance(STEP_SECONDS)

    @rule(count=st.integers(1, 3))
    def lose_broadcasts(self, count: int) -> None:
        """Rank 0's updates come late to all ranks."""
        for _ in range(count):
            self.world.engines["rich"].run(4, 1, lose_broadcast=True)

    @rule(engine=ENGINES)
    def burst(self, engine: str) -> None:
        """More reports than the socket and the agent hold."""
        for _ in range(90):
            self.world.engines[engine].run(2, 1)

    @rule(engine=ENGINES, count=st.integers(1, 3))
    def lose_packets(self, engine: str, count: int) -> None:
        """The next packets for the engine never reach it."""
        for _ in range(count):
            self.world.engines[engine].lose_packet()

    @rule(engine=ENGINES, back=st.integers(0, 3))
    def late_packet(self, engine: str, back: int) -> None:
        """A packet of this session comes again, or behind a newer one."""
        self.world.engines[engine].repeat_packet(back)

    @rule(engine=ENGINES)
    def look_twice(self, engine: str) -> None:
        """The second look finds what the agent had room for only after the first."""
        looking = self.world.engines[engine]
        for _ in range(2):
            self.world.settle()
            looking.choose(4, lose_broadcast=False)
        assert looking.is_up_to_date or looking.agent is None or looking.agent.stopped

    @precondition(lambda self: self.serving)
    @rule(engine=ENGINES)
    def idle(self, engine: str) -> None:
        """Plans come and no step runs, until the socket is full of them."""
        self.reload(planner={"lease_seconds": 0.2})
        self.world.advance(3.0)
        self.look_twice(engine)

    # Time.

    @rule(seconds=WAITS)
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=WAITS)
    def starve(self, seconds: float) -> None:
        """Time in which no process gets the processor."""
        self.world.clock.advance(seconds)

    @rule(which=st.integers(0, 2), turns=st.integers(1, 5))
    def turn(self, which: int, turns: int) -> None:
        """One process is quicker than the others."""
        process = self.process(which)
        if process is not None and not process.stopped:
            for _ in range(turns):
                process.loop.turn()

    @precondition(lambda self: self.serving)
    @rule(engine=ENGINES, seconds=WAITS)
    def sleep_through(self, engine: str, seconds: float) -> None:
        """The sidecar is stopped for a while; as it resumes, reports wait and timers are late."""
        sidecar = self.world.sidecar
        assert sidecar is not None
        sidecar.stopped = True
        self.step(engine=engine, count=3, batch_size=4, accepted=1, every=1)
        self.world.clock.advance(seconds)
        sidecar.stopped = False
        self.world.settle()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    # The network.

    @rule(direction=st.sampled_from(["up", "down"]))
    def hold(self, direction: str) -> None:
        self.world.network.held.add(direction)

    @precondition(lambda self: self.world.network.held)
    @rule()
    def release(self) -> None:
        self.world.network.held.clear()

    @precondition(lambda self: self.world.network.channels)
    @rule(which=st.integers(0, 1), arriving=st.integers(0, 3))
    def cut(self, which: int, arriving: int) -> None:
        channels = self.world.network.channels
        self.world.network.cut(channels[which % len(channels)], arriving)

    @precondition(lambda self: self.world.network.channels)
    @rule(which=st.integers(0, 1))
    def vanish(self, which: int) -> None:
        """A connection dies, and neither end notices."""
        channels = self.world.network.channels
        channels[which % len(channels)].vanished = True

    @precondition(lambda self: self.world.network.channels)
    @rule(which=st.integers(0, 1))
    def break_under_way(self, which: int) -> None:
        """A connection breaks while the agent waits to have written."""
        channels = self.world.network.channels
        channel = channels[which % len(channels)]
        self.world.network.held.add("down")
        self.step(engine=channel.engine, count=9, batch_size=4, accepted=1, every=1)
        if channel in self.world.network.channels:
            self.world.network.cut(channel, arriving=100)
        self.world.network.held.discard("down")

    # Processes.

    @rule(engine=ENGINES)
    def kill_agent(self, engine: str) -> None:
        killed = self.world.engines[engine]
        if killed.agent is not None and killed.agent.port is not None:
            self._bereft.add(engine)
            self.world.kill_agent(killed)

    @rule(engine=ENGINES)
    def start_agent(self, engine: str) -> None:
        if self.world.engines[engine].agent is None:
            self.world.start_agent(self.world.engines[engine])

    @precondition(lambda self: self.world.sidecar is not None)
    @rule(again=st.booleans())
    def kill_sidecar(self, again: bool) -> None:
        self.world.kill_sidecar()
        if again:
            self.world.start_sidecar()

    @precondition(lambda self: self.world.sidecar is None)
    @rule()
    def start_sidecar(self) -> None:
        self.world.start_sidecar()

    @precondition(lambda self: self.serving)
    @rule()
    def part(self) -> None:
        """SIGTERM; engines that are steered hold their plan for longer then."""
        assert self.world.sidecar is not None
        self.world.settle()
        steered = [
            engine
            for engine in self.world.engines.values()
            if self.is_reached(engine) and self.world.has_epochs_left(engine.spec.engine_id)
        ]
        self.world.sidecar.part()
        self.world.settle()
        for engine in steered:
            engine.choose(4, lose_broadcast=False)
            believed = engine.link.plan_follower.plan
            assert believed is not None
            assert believed.lease_ms == 1000 * self.world.settings.last_lease_seconds

    @rule(which=st.integers(0, 2))
    def stop(self, which: int) -> None:
        process = self.process(which)
        if process is not None:
            process.stopped = True

    @rule(which=st.integers(0, 2))
    def go_on(self, which: int) -> None:
        process = self.process(which)
        if process is not None:
            process.stopped = False

    # Operators.

    @precondition(lambda self: self.serving)
    @rule(
        rule=RULES,
        scope=SCOPES,
        batches=st.sampled_from([(0, 0), (0, 0), (3, 6), (0, 5)]),
        seconds=st.sampled_from([0.05, 0.5, 3.0, 30.0]),
    )
    def set_override(
        self, rule: Rule, scope: Scope, batches: tuple[int, int], seconds: float
    ) -> None:
        self._overrides_made += 1
        name = f"override-{self._overrides_made}"
        sizes = batches if rule.can_limit_batches else (0, 0)
        self.world.set_override(Override(name, scope, rule, "operator", "a test", *sizes), seconds)

    @precondition(lambda self: self.serving and self.world.active_override_ids)
    @rule(which=st.integers(0, 9))
    def clear_override(self, which: int) -> None:
        names = self.world.active_override_ids
        self.world.clear_override(names[which % len(names)])

    @precondition(lambda self: self.serving)
    @rule(planner=PLANNERS)
    def reload(self, planner: dict[str, float]) -> None:
        new_settings = self.world.settings.model_dump() | {"planner": planner}
        self.world.reload(Settings.load(new_settings))

    @precondition(lambda self: self.serving)
    @rule(engine=ENGINES, gamma=st.sampled_from([0, 1, 3]), measured=st.booleans())
    def measure(self, engine: str, gamma: int, measured: bool) -> None:
        """An engine is forced to an arm, and released."""
        self.world.measure(engine, gamma, steps=3 if measured else 0)

    # Sessions.

    @precondition(lambda self: self.serving)
    @rule(engine=ENGINES)
    def introduce_again(self, engine: str) -> None:
        """A second agent of the engine takes the session over, and goes."""
        self.world.usurp(engine)

    @precondition(lambda self: self.serving)
    @rule(engine=ENGINES, left=st.integers(0, 3))
    def age(self, engine: str, left: int) -> None:
        """The session's epochs and probes are about to run out of 64 bits."""
        self.world.age(engine, left)

    # What must hold.

    @invariant()
    def nothing_is_at_fault(self) -> None:
        self.world.require_no_faults()

    def teardown(self) -> None:
        try:
            self.calm()
        finally:
            self.world.close()
            self._directory.cleanup()

    def calm(self) -> None:
        """All continue; soon the newest plan steers both engines, and no report is missing."""
        world = self.world
        world.network.held.clear()
        for process in world.processes:
            process.stopped = False
        world.settle()
        deadline = world.clock.now() + _PATIENCE_SECONDS
        while not all(map(self.is_steered, world.engines.values())):
            assert world.clock.now() < deadline, [e.link.status() for e in world.engines.values()]
            if world.sidecar is None:
                world.start_sidecar()
            for engine in world.engines.values():
                if engine.agent is None:
                    world.start_agent(engine)
                engine.run(4, 1)
            world.advance(0.5)
        for name, engine in world.engines.items():
            ledger = engine.ledger
            assert ledger.last_folded == engine.step
            if name not in self._bereft:
                assert ledger.folded + ledger.told_lost == ledger.attempted
        world.require_no_faults()

    def is_steered(self, engine: RankedEngine) -> bool:
        """By the newest plan of a session whose core knows its last step."""
        sidecar = self.world.sidecar
        if sidecar is None or engine.spec.engine_id not in sidecar.engine_ids:
            return False
        engine.choose(4, lose_broadcast=False)
        believed = engine.link.plan_follower.plan
        session = sidecar.sidecar.registry.find_by_engine(engine.spec.engine_id)
        newest = (session.tag, session.plan.epoch)
        return (
            believed is not None
            and (believed.session, believed.epoch) == newest
            and engine.ledger.last_folded == engine.step
        )

    def is_reached(self, engine: RankedEngine) -> bool:
        """Steered, and nothing is between it and the sidecar."""
        channels = self.world.network.channels
        mine = [c for c in channels if c.engine == engine.spec.engine_id and not c.vanished]
        moving = engine.agent is not None and not engine.agent.stopped
        return bool(mine) and moving and not self.world.network.held and self.is_steered(engine)

    @property
    def serving(self) -> bool:
        sidecar = self.world.sidecar
        return sidecar is not None and not sidecar.stopped and sidecar.parting is None

    def process(self, which: int) -> Process | None:
        engines = list(self.world.engines.values())
        return self.world.sidecar if which == 2 else engines[which].agent
