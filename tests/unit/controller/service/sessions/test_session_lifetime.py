"""A session that has ended leaves memory, whoever has looked at it."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest

from controller.service.sessions.counters import History
from controller.service.sessions.session import EngineSession
from controller.service.views.engine_status import EngineSnapshot
from lab.harness.processes import free_port
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    SteerClient,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

# Enough introductions that a session kept for each would show.
TIMES = 12


async def look_at(
    running: RunningSidecar, engine_id: str, metrics_port: int, page_port: int
) -> None:
    """Everything that reads sessions: inspection, overview, metrics, page."""
    inspection = running.inspection
    await with_timeout(inspection.ListEngines(service_pb2.ListEnginesRequest()))
    await with_timeout(inspection.Explain(service_pb2.ExplainRequest(engine_id=engine_id)))
    await with_timeout(inspection.Overview(service_pb2.OverviewRequest()))
    status_cache = running.sidecar._status_cache
    status_cache._lines_until = 0.0
    await status_cache.lines()
    await status_cache.engine(engine_id, 0.0)
    for url in (
        f"http://127.0.0.1:{metrics_port}/metrics",
        f"http://127.0.0.1:{page_port}/api/v1/state",
        f"http://127.0.0.1:{page_port}/api/v1/engine?id={engine_id}",
    ):
        await asyncio.to_thread(read_all, url)


def read_all(url: str) -> None:
    with urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        assert answer.read()


async def visited(
    running: RunningSidecar, engine_id: str, metrics_port: int, page_port: int
) -> "weakref.ref[EngineSession]":
    """The session of an engine that came, reported, was looked at and closed its stream."""
    stream = SteerClient(running, await running.introduce(engine_id))
    session = running.sidecar.registry.find_by_engine(engine_id)
    await stream.send(report_message(1))
    await wait_until(lambda: session.counters.reports == 1)
    await look_at(running, engine_id, metrics_port, page_port)
    stream.call.cancel()
    await wait_until(lambda: not session.open_streams)
    return weakref.ref(session)


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


@pytest.mark.parametrize("names", [["same"], [f"engine-{n}" for n in range(4)]], ids=str)
async def test_a_session_that_was_looked_at_is_gone_once_it_is_over(
    tmp_path: Path, names: Sequence[str]
):
    metrics_port, page_port = free_port(), free_port()
    before = {kind: alive(kind) for kind in (EngineSession, History, EngineSnapshot)}
    async with running_sidecar(tmp_path, metrics_port=metrics_port, page_port=page_port) as running:
        ended_sessions = [
            await visited(running, names[number % len(names)], metrics_port, page_port)
            for number in range(TIMES)
        ]
        in_use = len(names)

        def only_the_last_remain() -> bool:
            gc.collect()
            return sum(ref() is not None for ref in ended_sessions) == in_use

        await wait_until(only_the_last_remain)
        # Fewer where what another test has left behind is gone by now.
        for kind, count in before.items():
            assert alive(kind) <= count + in_use


async def test_a_session_holds_nothing_of_a_stream_that_has_ended(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1))
        await stream.plan()
        session = running.sidecar.registry.find_by_engine("engine-0")
        assert session.stream is not None
        stream.call.cancel()
        await wait_until(lambda: not session.open_streams)
        assert session.stream is None
