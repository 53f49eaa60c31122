"""Courses of events that the machine has found, as hypothesis prints them."""

from collections.abc import Callable
from typing import Final

from tests.system.concurrency.machine import Link


def a_stream_that_its_agent_gives_up(state: Link) -> None:
    """Nothing gets through to the sidecar until the agents give their streams up as silent."""
    state.begin(settled=True, count=0, rule=None)
    state.hold(direction="up")
    state.burst(engine="rich")
    state.burst(engine="rich")
    state.settle()
    state.idle(engine="rich")
    state.lose_packets(count=3, engine="rich")
    state.settle()
    state.hold(direction="down")
    state.settle()
    state.settle()
    state.lose_packets(count=3, engine="rich")
    state.turn(turns=4, which=0)
    state.look_twice(engine="plain")
    state.look_twice(engine="rich")
    state.settle()
    state.idle(engine="plain")
    state.turn(turns=1, which=2)
    state.hold(direction="up")
    state.release()
    state.idle(engine="rich")
    state.lose_packets(count=1, engine="plain")
    state.idle(engine="rich")
    state.lose_packets(count=1, engine="plain")
    state.hold(direction="up")
    state.look_twice(engine="rich")
    state.idle(engine="plain")
    state.burst(engine="plain")
    state.look_twice(engine="plain")
    state.look_twice(engine="plain")
    state.release()
    state.hold(direction="up")
    state.lose_packets(count=1, engine="rich")
    state.settle()
    state.turn(turns=5, which=2)
    state.look_twice(engine="plain")
    state.turn(turns=2, which=0)
    state.look_twice(engine="plain")
    state.settle()
    state.look_twice(engine="plain")


REGRESSIONS: Final[tuple[Callable[[Link], None], ...]] = (a_stream_that_its_agent_gives_up,)
