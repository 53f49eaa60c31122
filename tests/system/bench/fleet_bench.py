"""A fleet on this machine: many sidecar states in one process, one real redis-server.

    python -m tests.system.bench.fleet_bench --sidecars 200

Every state is what a sidecar has without its gRPC server: store, book, registry, and the sessions
of its engines.  Measured: how long an override takes from the operator's call to the plans of
every engine, what Redis is asked per sidecar and second while nothing changes, memory per engine.
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

from controller.core.clock import WallClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.service.sessions.override_registry import OverrideRegistry
from controller.service.sessions.profile_registry import ProfileRegistry
from controller.service.sessions.registry import SessionRegistry
from controller.store.interface import Actor
from controller.store.redis_store import RedisStore
from tests.support.redis_server import RedisServer
from tests.support.virtual_engine import engine_spec
from tests.system.bench.measurement import Measurement, percentiles, run

QUIET_SECONDS = 10.0
ANN = Actor("ann", "bench", "bench")


class State:
    """One sidecar."""

    def __init__(self, url: str, number: int, engines: int) -> None:
        clock = WallClock()

        def core(spec: EngineSpec, profile: Profile | None) -> EngineController:
            return EngineController(spec, PlannerSettings(), profile, clock)

        self.registry = SessionRegistry(core, ProfileRegistry(), clock)
        self.override_registry = OverrideRegistry(RedisStore(url), self.registry)
        for engine in range(engines):
            spec = engine_spec()
            self.registry.introduce(
                EngineSpec(
                    f"pod-{number}-{engine}", spec.fingerprint, spec.drafters, spec.max_batch_size
                )
            )

    def obeys(self, override_id: str) -> bool:
        """Every engine's plan names the override."""
        return all(override_id in session.plan.overrides for session in self.registry)


async def fan_out(states: list[State], changes: int) -> list[float]:
    """Seconds until each state obeyed, for every change."""
    delays: list[float] = []
    for number in range(changes):
        name = f"change-{number}"
        override = Override(name, Scope(ScopeKind.FLEET), Rule(gamma_max=2), "ann", "bench")
        began = time.monotonic()
        held, _ = await states[number % len(states)].override_registry.set(override, 60.0, "", ANN)
        waiting = list(states)
        while waiting:
            waiting = [state for state in waiting if not state.obeys(name)]
            now = time.monotonic() - began
            delays += [now] * (len(states) - len(waiting) - (len(delays) - number * len(states)))
            await asyncio.sleep(0.001)
        await states[0].override_registry.clear(name, held.etag, ANN)
    return delays


async def _bench(sidecars: int, engines: int, changes: int) -> tuple[list[float], float, float]:
    """Seconds of every change, Redis commands per sidecar and second, bytes an engine."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        rss = psutil.Process().memory_info().rss
        states = [State(server.url, number, engines) for number in range(sidecars)]
        await asyncio.gather(*(state.override_registry.open() for state in states))
        grown = psutil.Process().memory_info().rss - rss
        await asyncio.sleep(2)
        with server.client() as client:
            before: Any = client.info("stats")
            await asyncio.sleep(QUIET_SECONDS)
            after: Any = client.info("stats")
        commands = after["total_commands_processed"] - before["total_commands_processed"]
        delays = await fan_out(states, changes)
        await asyncio.gather(*(state.override_registry.close() for state in states))
    return delays, commands / (QUIET_SECONDS * sidecars), grown / (sidecars * engines)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """The figures of several runs; memory of the first only, which grew this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    runs = [
        asyncio.run(_bench(options.sidecars, options.engines, options.changes))
        for _ in range(options.repeats)
    ]
    delays, commands, grown = zip(*runs, strict=True)
    local = options.sidecars == 1
    of = "1 sidecar" if local else f"{options.sidecars} sidecars"
    yield from percentiles(
        f"override to the plans of {of}, one Redis",
        "ms",
        [[1e3 * delay for delay in run] for run in delays],
        {99.0: 50.0 if local else 1000.0},
    )
    yield Measurement(f"Redis commands in quiet, each of {of}, a second", "1/s", commands)
    yield Measurement(f"memory of an engine, of {of}", "KiB", [grown[0] / 1024])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sidecars", type=int, default=200)
    parser.add_argument("--engines", type=int, default=1, help="of each")
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    run(parser, measure, "tests.system.bench.fleet_bench")


if __name__ == "__main__":
    main()
