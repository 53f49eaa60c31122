"""What the machine has found, each as a short course of events."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.overrides import Override, Rule, Scope, ScopeKind
from tests.concurrency.engine import STEP_SECONDS, Engine
from tests.concurrency.world import World

PINNED = Override("pinned", Scope(ScopeKind.FLEET), Rule(gamma=0), "operator", "a test")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        made.settle()
        yield made
    finally:
        made.close()


def steps(world: World, engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.run(4, 1)
        world.advance(STEP_SECONDS)


def test_a_report_under_way_as_the_stream_breaks_is_neither_counted_nor_told_lost_twice(
    world: World,
):
    engine = world.engines["plain"]
    steps(world, engine, 3)
    # Nothing comes back, so that the agent's write waits for room.
    world.network.held.add("down")
    steps(world, engine, 12)
    channel = next(c for c in world.network.channels if c.engine == "plain")
    world.network.cut(channel, arriving=100)
    world.network.held.clear()
    world.advance(3.0)
    steps(world, engine, 3)
    world.require_no_faults()
    ledger = engine.ledger
    assert ledger.last_folded == engine.step
    assert ledger.written <= ledger.attempted


def test_an_override_that_ran_out_while_the_sidecar_was_stopped_shapes_no_plan(world: World):
    engine = world.engines["plain"]
    steps(world, engine, 30)
    world.set_override(PINNED, 0.5)
    steps(world, engine, 5)
    assert world.sidecar is not None
    world.sidecar.stopped = True
    steps(world, engine, 5)
    world.clock.advance(3.0)
    world.sidecar.stopped = False
    world.settle()
    world.require_no_faults()
    assert world.sidecar.sidecar.registry.by_engine("plain").plan.overrides == ()


def test_a_session_whose_epochs_run_out_is_followed_by_another(world: World):
    engine = world.engines["plain"]
    steps(world, engine, 3)
    before = engine.ledger.newest
    world.age("plain", left=2)
    world.advance(20.0)
    steps(world, engine, 3)
    session, epoch = engine.ledger.newest
    assert session != before[0]
    assert epoch < 100
    assert engine.link.steering.plan is not None
    assert engine.link.steering.plan.session == session
    world.require_no_faults()
