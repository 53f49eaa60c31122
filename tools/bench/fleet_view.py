"""What it costs that every sidecar can show the engines of all: for Redis, and for one sidecar.

Sidecar states in this process publish as sidecars do, to a real redis-server.  One real sidecar
process beside them is asked for the fleet, as `controller top --fleet` asks.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import psutil
import redis

from controller.core.clock import WallClock
from controller.service.net.unix_sockets import OperatorSocket
from controller.service.views.fleet_summary import PUBLISH_SECONDS
from controller.service.views.fleet_view import FleetView
from controller.service.views.readiness import Readiness
from controller.service.views.status_cache import StatusCache
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import sidecar_process
from tools.bench.measurement import Measurement, percentiles
from tools.bench.sidecar_states import State

_LOOK_SECONDS = 0.5


# What was used since some start, or in a second, by name.
Usage: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """One run.

    quiet: nothing is published.  publishing: all publish.  looking: one is asked as well.
    idle, asked: of the sidecar process.  memory: bytes of Redis for all summaries.  latencies:
    seconds of each ListFleet.
    """

    quiet: Usage
    publishing: Usage
    looking: Usage
    idle: float
    asked: float
    memory: float
    latencies: Sequence[float]


def view_of(state: State) -> FleetView:
    """What publishes a state's engines, and reads those of others."""
    clock = WallClock()
    readiness = Readiness(
        state.registry, state.profiles, state.override_registry,
        OperatorSocket(Path("/nowhere/controller.sock")), "guess",
        state.supervisor,
    )  # fmt: skip
    cache = StatusCache(state.registry, state.override_registry, readiness, clock)
    return FleetView(state.store.summaries, cache, clock)


def _usage(client: "redis.Redis", process: psutil.Process) -> Usage:
    """cpu_seconds: of the process."""
    stats: Any = client.info("stats")
    cpu: Any = client.info("cpu")
    return {
        "commands": stats["total_commands_processed"],
        "bytes_in": stats["total_net_input_bytes"],
        "bytes_out": stats["total_net_output_bytes"],
        "redis_cpu_seconds": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        "cpu_seconds": _cpu(process),
    }


async def _used(read: Callable[[], Usage], during: Coroutine[Any, Any, object]) -> Usage:
    before, began = read(), time.monotonic()
    await during
    after, seconds = read(), time.monotonic() - began
    return {name: (after[name] - before[name]) / seconds for name in after}


async def _costs(sidecars: int, engines: int, seconds: float) -> Costs:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder) / "redis") as server,
        server.client() as client,
        sidecar_process(
            Path(folder), environment={"CONTROLLER_REDIS_URL": server.url},
            log=Path(folder) / "log",
        ) as asked,
    ):  # fmt: skip
        own, theirs = psutil.Process(), psutil.Process(asked.process.pid)
        states = [State(server.url, number, engines) for number in range(sidecars)]
        await asyncio.gather(*(state.open() for state in states))
        views = [view_of(state) for state in states]
        await asyncio.sleep(2)
        quiet = await _used(lambda: _usage(client, own), asyncio.sleep(seconds))
        memory: Any = client.info("memory")["used_memory_dataset"]
        for state, view in zip(states, views, strict=True):
            state.supervisor.run("fleet_summary", view.publisher.publish)
            await asyncio.sleep(PUBLISH_SECONDS / sidecars)
        idle = _cpu(theirs)
        publishing = await _used(lambda: _usage(client, own), asyncio.sleep(seconds))
        idle = (_cpu(theirs) - idle) / seconds
        after: Any = client.info("memory")["used_memory_dataset"]
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            await loop.run_in_executor(pool, time.sleep, 0)
            busy, began = _cpu(theirs), time.monotonic()
            looks = loop.run_in_executor(pool, look, asked.address, sidecars * engines, seconds)
            looking = await _used(lambda: _usage(client, own), asyncio.wait([looks]))
            latencies = await looks
            busy = (_cpu(theirs) - busy) / (time.monotonic() - began)
        await asyncio.gather(*(state.close() for state in states))
        await asyncio.gather(*(view.close() for view in views))
    return Costs(quiet, publishing, looking, idle, busy, after - memory, latencies)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def look(address: str, engines: int, seconds: float) -> list[float]:
    """Asks for the whole fleet every half second; seconds of each call but the first.

    For a process of its own: the sidecar states keep this one busy.
    """
    latencies: list[float] = []
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.InspectionServiceStub(channel)
        stub.ListFleet(service_pb2.ListFleetRequest())
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            answer = stub.ListFleet(service_pb2.ListFleetRequest())
            latencies.append(time.monotonic() - began)
            if len(answer.engines) != engines or answer.trouble:
                raise RuntimeError(
                    f"{len(answer.engines)} of {engines} engines are listed: {answer.trouble}"
                )
            time.sleep(_LOOK_SECONDS)
    return latencies


def measure(sidecars: int, engines: int, seconds: float, repeats: int) -> Iterable[Measurement]:
    """The figures of several runs."""
    runs = [asyncio.run(_costs(sidecars, engines, seconds)) for _ in range(repeats)]
    of = f"{sidecars} sidecars" if sidecars > 1 else "1 sidecar"
    of += f" with {engines} engines" if engines > 1 else ""

    def more(name: str, factor: float = 1.0) -> list[float]:
        """What publishing adds to the quiet state."""
        return [factor * (run.publishing[name] - run.quiet[name]) for run in runs]

    yield Measurement(f"Redis commands for summaries of {of}, a second", "1/s", more("commands"))
    yield Measurement(
        f"bytes to Redis for summaries of {of}, a second", "KiB/s", more("bytes_in", 1 / 1024)
    )
    yield Measurement(
        f"processor time of Redis for summaries of {of}", "ms/s", more("redis_cpu_seconds", 1e3)
    )
    yield Measurement(
        f"memory of Redis for summaries of {of}", "KiB", [run.memory / 1024 for run in runs]
    )
    yield Measurement(
        f"processor time of a sidecar for its summaries, each of {of}", "ms/s",
        more("cpu_seconds", 1e3 / sidecars),
    )  # fmt: skip
    yield Measurement(
        f"bytes from Redis while one looks at {of}, a second", "KiB/s",
        [(run.looking["bytes_out"] - run.publishing["bytes_out"]) / 1024 for run in runs],
    )  # fmt: skip
    yield Measurement(
        f"processor time of a sidecar that is asked for {of} twice a second", "ms/s",
        [1e3 * (run.asked - run.idle) for run in runs],
    )  # fmt: skip
    yield from percentiles(
        f"ListFleet of {of}", "ms", [[1e3 * found for found in run.latencies] for run in runs]
    )
