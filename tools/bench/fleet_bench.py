"""A fleet on this machine: many sidecar states in one process, one real redis-server.

    python -m tools.bench.fleet_bench --sidecars 200
    python -m tools.bench.fleet_bench --view

Every state is what a sidecar has without its gRPC server: store, book, registry, and the sessions
of its engines.  Measured: how long an override takes from the operator's call to the plans of
every engine, what Redis is asked per sidecar and second while nothing changes, memory per engine.
With --view: what it costs that every sidecar can show the engines of all (`fleet_view`).
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import structlog

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.store.interface import Actor
from tests.support.redis_server import RedisServer
from tools.bench import fleet_view
from tools.bench.measurement import Measurement, command_line, percentiles, run
from tools.bench.sidecar_states import State

QUIET_SECONDS = 10.0
ANN = Actor("ann", "bench", "bench")


async def fan_out(states: list[State], changes: int) -> list[float]:
    """Seconds until each state obeyed, for every change."""
    delays: list[float] = []
    for number in range(changes):
        name = f"change-{number}"
        override = Override(name, Scope(ScopeKind.FLEET), Rule(gamma_max=2), "ann", "bench")
        start = time.monotonic()
        stored, _ = await states[number % len(states)].override_registry.set_override(
            override, 60.0, "", ANN
        )
        waiting = list(states)
        while waiting:
            waiting = [state for state in waiting if not state.obeys(name)]
            now = time.monotonic() - start
            delays += [now] * (len(states) - len(waiting) - (len(delays) - number * len(states)))
            await asyncio.sleep(0.001)
        await states[0].override_registry.clear_override(name, stored.etag, ANN)
    return delays


async def _bench(sidecars: int, engines: int, changes: int) -> tuple[list[float], float, float]:
    """Seconds of every change, Redis commands per sidecar and second, bytes an engine."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        rss = psutil.Process().memory_info().rss
        states = [State(server.url, number, engines) for number in range(sidecars)]
        await asyncio.gather(*(state.open() for state in states))
        grown = psutil.Process().memory_info().rss - rss
        await asyncio.sleep(2)
        with server.client() as client:
            stats_before: Any = client.info("stats")
            await asyncio.sleep(QUIET_SECONDS)
            stats_after: Any = client.info("stats")
        commands = (
            stats_after["total_commands_processed"] - stats_before["total_commands_processed"]
        )
        delays = await fan_out(states, changes)
        await asyncio.gather(*(state.close() for state in states))
    return delays, commands / (QUIET_SECONDS * sidecars), grown / (sidecars * engines)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """The figures of several runs; memory of the first only, which grew this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.view:
        yield from fleet_view.measure(
            options.sidecars, options.engines, options.seconds, options.repeats
        )
        return
    runs = [
        asyncio.run(_bench(options.sidecars, options.engines, options.changes))
        for _ in range(options.repeats)
    ]
    delays, commands, grown = zip(*runs, strict=True)
    local = options.sidecars == 1
    fleet_size = "1 sidecar" if local else f"{options.sidecars} sidecars"
    yield from percentiles(
        f"override to the plans of {fleet_size}, one Redis",
        "ms",
        [[1e3 * delay for delay in run] for run in delays],
        {99.0: 50.0 if local else 1000.0},
    )
    yield Measurement(f"Redis commands in quiet, each of {fleet_size}, a second", "1/s", commands)
    yield Measurement(f"memory of an engine, of {fleet_size}", "KiB", [grown[0] / 1024])


PARSER = command_line(__doc__, repeats=3)
PARSER.add_argument("--sidecars", type=int, default=200)
PARSER.add_argument("--engines", type=int, default=1, help="of each")
PARSER.add_argument("--changes", type=int, default=50)
PARSER.add_argument("--view", action="store_true", help="the view of all engines instead")
PARSER.add_argument("--seconds", type=float, default=20.0, help="of each part of --view")

if __name__ == "__main__":
    run(PARSER, measure)
