"""Measures the cost of the fleet view of every sidecar: for Redis, and for one sidecar.

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

_POLL_SECONDS = 0.5


# What was used since some start, or in a second, by name.
Usage: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one run.

    quiet: nothing is published.  publishing: all publish.  polling: one is asked as well.
    idle_cores, polled_cores: of the sidecar process.  memory: bytes of Redis for all summaries.
    latencies: seconds of each ListFleet.
    """

    quiet: Usage
    publishing: Usage
    polling: Usage
    idle_cores: float
    polled_cores: float
    memory: float
    latencies: Sequence[float]


def build_view(state: State) -> FleetView:
    """Returns the view that publishes a state's engines and reads those of others."""
    clock = WallClock()
    readiness = Readiness(
        state.registry, state.profiles, state.override_registry,
        OperatorSocket(Path("/nowhere/controller.sock")), "guess",
        state.supervisor,
    )  # fmt: skip
    cache = StatusCache(state.registry, state.override_registry, readiness, clock)
    return FleetView(state.store.summaries, cache, clock)


def _usage(client: "redis.Redis", process: psutil.Process) -> Usage:
    """Returns the usage so far: of Redis, and `cpu_seconds` of the process."""
    stats: Any = client.info("stats")
    cpu: Any = client.info("cpu")
    return {
        "commands": stats["total_commands_processed"],
        "bytes_in": stats["total_net_input_bytes"],
        "bytes_out": stats["total_net_output_bytes"],
        "redis_cpu_seconds": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        "cpu_seconds": _cpu(process),
    }


async def _usage_rate(read: Callable[[], Usage], during: Coroutine[Any, Any, object]) -> Usage:
    usage_before, start = read(), time.monotonic()
    await during
    usage_after, seconds = read(), time.monotonic() - start
    return {name: (usage_after[name] - usage_before[name]) / seconds for name in usage_after}


async def _costs(sidecars: int, engines: int, seconds: float) -> Costs:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder) / "redis") as server,
        server.client() as client,
        sidecar_process(
            Path(folder), environment={"CONTROLLER_REDIS_URL": server.url},
            log=Path(folder) / "log",
        ) as sidecar,
    ):  # fmt: skip
        own_process, asked_process = psutil.Process(), psutil.Process(sidecar.process.pid)
        states = [State(server.url, number, engines) for number in range(sidecars)]
        await asyncio.gather(*(state.open() for state in states))
        views = [build_view(state) for state in states]
        await asyncio.sleep(2)
        quiet = await _usage_rate(lambda: _usage(client, own_process), asyncio.sleep(seconds))
        memory: Any = client.info("memory")["used_memory_dataset"]
        for state, view in zip(states, views, strict=True):
            state.supervisor.run("fleet_summary", view.publisher.publish)
            await asyncio.sleep(PUBLISH_SECONDS / sidecars)
        idle = _cpu(asked_process)
        publishing = await _usage_rate(lambda: _usage(client, own_process), asyncio.sleep(seconds))
        idle = (_cpu(asked_process) - idle) / seconds
        memory_after: Any = client.info("memory")["used_memory_dataset"]
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            await loop.run_in_executor(pool, time.sleep, 0)
            busy, start = _cpu(asked_process), time.monotonic()
            polls = loop.run_in_executor(
                pool, poll_fleet, sidecar.address, sidecars * engines, seconds
            )
            polling = await _usage_rate(lambda: _usage(client, own_process), asyncio.wait([polls]))
            latencies = await polls
            busy = (_cpu(asked_process) - busy) / (time.monotonic() - start)
        await asyncio.gather(*(state.close() for state in states))
        await asyncio.gather(*(view.close() for view in views))
    return Costs(quiet, publishing, polling, idle, busy, memory_after - memory, latencies)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def poll_fleet(address: str, engines: int, seconds: float) -> list[float]:
    """Asks for the whole fleet every half second; seconds of each call but the first.

    For a process of its own: the sidecar states keep this one busy.
    """
    latencies: list[float] = []
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.InspectionServiceStub(channel)
        stub.ListFleet(service_pb2.ListFleetRequest())
        end = time.monotonic() + seconds
        while (call_start := time.monotonic()) < end:
            answer = stub.ListFleet(service_pb2.ListFleetRequest())
            latencies.append(time.monotonic() - call_start)
            if len(answer.engines) != engines or answer.trouble:
                raise RuntimeError(
                    f"{len(answer.engines)} of {engines} engines are listed: {answer.trouble}"
                )
            time.sleep(_POLL_SECONDS)
    return latencies


def measure(sidecars: int, engines: int, seconds: float, repeats: int) -> Iterable[Measurement]:
    """The figures of several runs."""
    runs = [asyncio.run(_costs(sidecars, engines, seconds)) for _ in range(repeats)]
    fleet_size = f"{sidecars} sidecars" if sidecars > 1 else "1 sidecar"
    fleet_size += f" with {engines} engines" if engines > 1 else ""

    def added(name: str, factor: float = 1.0) -> list[float]:
        """Returns what publishing adds to the quiet state, by run."""
        return [factor * (run.publishing[name] - run.quiet[name]) for run in runs]

    yield Measurement(
        f"Redis commands for summaries of {fleet_size}, a second", "1/s", added("commands")
    )
    yield Measurement(
        f"bytes to Redis for summaries of {fleet_size}, a second",
        "KiB/s",
        added("bytes_in", 1 / 1024),
    )
    yield Measurement(
        f"processor time of Redis for summaries of {fleet_size}",
        "ms/s",
        added("redis_cpu_seconds", 1e3),
    )
    yield Measurement(
        f"memory of Redis for summaries of {fleet_size}", "KiB", [run.memory / 1024 for run in runs]
    )
    yield Measurement(
        f"processor time of a sidecar for its summaries, each of {fleet_size}", "ms/s",
        added("cpu_seconds", 1e3 / sidecars),
    )  # fmt: skip
    yield Measurement(
        f"bytes from Redis while one looks at {fleet_size}, a second", "KiB/s",
        [(run.polling["bytes_out"] - run.publishing["bytes_out"]) / 1024 for run in runs],
    )  # fmt: skip
    yield Measurement(
        f"processor time of a sidecar that is asked for {fleet_size} twice a second", "ms/s",
        [1e3 * (run.polled_cores - run.idle_cores) for run in runs],
    )  # fmt: skip
    yield from percentiles(
        f"ListFleet of {fleet_size}",
        "ms",
        [[1e3 * latency for latency in run.latencies] for run in runs],
    )
