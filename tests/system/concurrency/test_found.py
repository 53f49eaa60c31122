"""What the machine has found, each as a short course of events."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from tests.system.concurrency.dealing import silence
from tests.system.concurrency.engine import STEP_SECONDS, RankedEngine
from tests.system.concurrency.machine import Link
from tests.system.concurrency.sequences import REGRESSIONS
from tests.system.concurrency.world import World

PINNED = Override("pinned", Scope(ScopeKind.FLEET), Rule(gamma=0), "operator", "a test")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    new_world = World(tmp_path)
    try:
        new_world.settle()
        yield new_world
    finally:
        new_world.close()


def steps(world: World, engine: RankedEngine, count: int) -> None:
    for _ in range(count):
        engine.run(4, 1)
        world.advance(STEP_SECONDS)


@pytest.mark.parametrize("course", REGRESSIONS)
def test_a_course_of_events_that_was_found_loses_no_report(course: Callable[[Link], None]):
    with silence():
        state = Link()
        try:
            course(state)
        finally:
            state.teardown()


def test_what_was_under_way_as_a_silent_stream_was_given_up_is_sent_again(world: World):
    engine = world.engines["plain"]
    steps(world, engine, 3)
    session = engine.ledger.newest[0]
    world.network.held.update({"up", "down"})
    steps(world, engine, 4)
    world.advance(10.0)
    world.network.held.clear()
    world.advance(3.0)
    steps(world, engine, 1)
    ledger = engine.ledger
    assert ledger.newest[0] != session
    assert (ledger.folded, ledger.told_lost, ledger.attempted) == (8, 0, 8)


def test_what_a_killed_sidecar_has_not_acknowledged_is_told_to_the_next_one_as_lost(world: World):
    engine = world.engines["plain"]
    steps(world, engine, 3)
    # It uses these, and what it says of it gets nowhere.
    world.network.held.add("down")
    steps(world, engine, 2)
    world.kill_sidecar()
    world.network.held.clear()
    world.start_sidecar()
    world.advance(3.0)
    steps(world, engine, 1)
    assert world.sidecar is not None
    dropped_by_killed = world.sidecar.sidecar.registry.find_by_engine(
        "plain"
    ).counters.dropped_reports
    ledger = engine.ledger
    assert 2 <= dropped_by_killed == ledger.told_lost <= 5
    assert ledger.folded + ledger.told_lost == ledger.attempted


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
    assert ledger.folded + ledger.told_lost == ledger.attempted


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
    assert world.sidecar.sidecar.registry.find_by_engine("plain").plan.overrides == ()


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
    assert engine.link.plan_follower.plan is not None
    assert engine.link.plan_follower.plan.session == session
    world.require_no_faults()
