"""A fleet on this machine: many sidecar states in one process, one real redis-server.

    python -m tests.bench.fleet_bench [--sidecars 200] [--engines 1] [--changes 50]

Every state is what a sidecar has without its gRPC server: store, book, registry, and the sessions
of its engines.  Prints JSON: how long an override takes from the operator's call to the plans of
every engine, what Redis is asked per sidecar and second while nothing changes, memory per engine.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from controller.core.clock import WallClock
from controller.core.engine_controller import EngineController
from controller.core.overrides import Override, Rule, Scope, ScopeKind
from controller.core.profile import Profile
from controller.core.settings import PlannerSettings
from controller.core.types import EngineSpec
from controller.service.override_book import OverrideBook
from controller.service.profile_library import ProfileLibrary
from controller.service.sessions import SessionRegistry
from controller.store.port import Who
from controller.store.redis_store import RedisStore
from tests.controller.core.virtual_engine import engine_spec
from tests.controller.store.redis_server import RedisServer

QUIET_SECONDS = 10.0
ANN = Who("ann", "bench", "bench")


class State:
    """One sidecar."""

    def __init__(self, url: str, number: int, engines: int) -> None:
        clock = WallClock()

        def core(spec: EngineSpec, profile: Profile | None) -> EngineController:
            return EngineController(spec, PlannerSettings(), profile, clock)

        self.registry = SessionRegistry(core, ProfileLibrary(), clock)
        self.book = OverrideBook(RedisStore(url), self.registry)
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
        held, _ = await states[number % len(states)].book.set(override, 60.0, "", ANN)
        waiting = list(states)
        while waiting:
            waiting = [state for state in waiting if not state.obeys(name)]
            now = time.monotonic() - began
            delays += [now] * (len(states) - len(waiting) - (len(delays) - number * len(states)))
            await asyncio.sleep(0.001)
        await states[0].book.clear(name, held.etag, ANN)
    return delays


async def bench(sidecars: int, engines: int, changes: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        rss = psutil.Process().memory_info().rss
        states = [State(server.url, number, engines) for number in range(sidecars)]
        await asyncio.gather(*(state.book.open() for state in states))
        grown = psutil.Process().memory_info().rss - rss
        await asyncio.sleep(2)
        with server.client() as client:
            before: Any = client.info("stats")
            await asyncio.sleep(QUIET_SECONDS)
            after: Any = client.info("stats")
        quiet = (after["total_commands_processed"] - before["total_commands_processed"]) / (
            QUIET_SECONDS * sidecars
        )
        delays = sorted(await fan_out(states, changes))
        with server.client() as client:
            memory: Any = client.info("memory")
        await asyncio.gather(*(state.book.close() for state in states))
    return {
        "sidecars": sidecars,
        "engines_each": engines,
        "changes": changes,
        "fan_out_ms": {
            "p50": round(1e3 * statistics.median(delays), 1),
            "p99": round(1e3 * delays[int(0.99 * len(delays))], 1),
            "max": round(1e3 * delays[-1], 1),
        },
        "redis_commands_per_sidecar_second_quiet": round(quiet, 2),
        "redis_memory_mib": round(memory["used_memory"] / 2**20, 1),
        "memory_per_engine_kib": round(grown / 1024 / (sidecars * engines)),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sidecars", type=int, default=200)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--changes", type=int, default=50)
    given = parser.parse_args()
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found = asyncio.run(bench(given.sidecars, given.engines, given.changes))
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
