"""Lists of engines: pages, and rows that cannot be made."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from controller.client.paging import collect_pages_async
from controller.core.engine.engine_controller import EngineController
from controller.service.net.errors import NoSessionError
from controller.service.net.limits import FairQueue
from controller.service.sessions.counters import COUNT_MAX
from controller.service.views import engine_status, paging
from controller.wire.explanations import Explanation, explain
from lab.harness.processes import free_port
from speculation.v1 import engine_pb2, service_pb2
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

NAMES = [f"engine-{number}" for number in range(7)]
GRPC_DEFAULT_BYTES = 4 * 1024 * 1024


@pytest.fixture(params=["ListEngines", "Overview", "ListFleet"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scraped(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read(), "utf-8")


def asked(
    running: RunningSidecar, method: str, page_size: int = 0
) -> Callable[[str], Awaitable[Any]]:
    kind = getattr(service_pb2, f"{method}Request")
    call = getattr(running.inspection, method)
    return lambda token: with_timeout(call(kind(page_size=page_size, page_token=token)))


def name_of(
    row: service_pb2.EngineStatus | service_pb2.EngineOverview | service_pb2.FleetEngine,
) -> str:
    return row.engine.engine_id if isinstance(row, service_pb2.EngineStatus) else row.engine_id


async def test_pages_add_up_to_all_engines_in_order(tmp_path: Path, method: str):
    async with running_sidecar(tmp_path) as running:
        for name in reversed(NAMES):
            await running.introduce(name)
        page = asked(running, method, 3)
        first = await page("")
        assert [name_of(row) for row in first.engines] == NAMES[:3]
        second = await page(first.next_page_token)
        assert [name_of(row) for row in second.engines] == NAMES[3:6]
        third = await page(second.next_page_token)
        assert [name_of(row) for row in third.engines] == NAMES[6:]
        assert not third.next_page_token
        merged = await collect_pages_async(page)
        assert [name_of(row) for row in merged.engines] == NAMES


async def test_a_client_that_knows_nothing_of_pages_sees_everything(tmp_path: Path, method: str):
    async with running_sidecar(tmp_path) as running:
        for name in NAMES:
            await running.introduce(name)
        answer = await asked(running, method)("")
        assert [name_of(row) for row in answer.engines] == NAMES
        assert not answer.next_page_token


async def test_an_engine_that_left_between_two_pages_takes_no_other_one_along(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for name in NAMES:
            await running.introduce(name)
        page = asked(running, "ListEngines", 2)
        first = await page("")
        registry = running.sidecar.registry
        registry._remove(registry.find_by_engine(NAMES[1]), NoSessionError("gone"))
        second = await page(first.next_page_token)
        assert [name_of(row) for row in second.engines] == NAMES[2:4]


async def test_a_page_token_that_is_none_is_refused(tmp_path: Path, method: str):
    async with running_sidecar(tmp_path) as running:
        code, _ = await failure(asked(running, method)("x" * 1_000))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def bulky(number: int) -> engine_pb2.EngineSpec:
    """About as large as an introduction may be."""
    engine = engine_message(f"bulky-{number:02}")
    del engine.drafters[:]
    for drafter in range(8):
        engine.drafters.add(
            name=f"d{drafter}", kind=engine_pb2.DRAFTER_KIND_MTP, gammas=(0, 1),
            model="m" * 3_900, revision="r" * 3_900,
        )  # fmt: skip
    return engine


async def test_introductions_that_fill_a_message_are_listed_on_several_pages(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for number in range(80):
            request = service_pb2.IntroduceRequest(engine=bulky(number))
            await with_timeout(running.speculation.Introduce(request))
        page = asked(running, "ListEngines")
        first = await page("")
        assert first.ByteSize() < GRPC_DEFAULT_BYTES
        assert first.next_page_token
        merged = await collect_pages_async(page)
        assert len(merged.engines) == 80


async def test_an_introduction_without_end_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        engine = bulky(0)
        engine.fingerprint.device = "d" * 3_900
        request = service_pb2.IntroduceRequest(engine=engine)
        code, details = await failure(running.speculation.Introduce(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes" in details


async def test_counters_that_clients_feed_stop_where_a_message_ends(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        for _ in range(3):
            await stream.send(dropped=COUNT_MAX)
        await stream.send(report_message(1), dropped=1)
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.counters.reports == 1)
        assert (await running.status()).dropped_reports == COUNT_MAX
        await stream.call.done_writing()
        assert (await stream.end())[0] is grpc.StatusCode.OK


async def test_an_engine_that_cannot_be_shown_hides_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    port = free_port()
    async with running_sidecar(tmp_path, metrics_port=port) as running:
        for name in ("a", "broken", "c"):
            await running.introduce(name)
        broken = running.sidecar.registry.find_by_engine("broken")
        broken.counters.dropped_reports = COUNT_MAX + 1

        def breaking(core: EngineController, batch_size: int = 0) -> Explanation:
            if core is broken.core:
                raise ArithmeticError("1/0\n\x1b[31m")
            return explain(core, batch_size)

        monkeypatch.setattr(engine_status, "explain", breaking)
        for method, reason in (("ListEngines", "ValueError"), ("Overview", "ArithmeticError")):
            answer = await asked(running, method)("")
            rows = {name_of(row): row.unavailable for row in answer.engines}
            assert list(rows) == ["a", "broken", "c"]
            assert reason in rows["broken"]
            assert rows["broken"].isprintable()
            assert not rows["a"] + rows["c"]
        text = await asyncio.to_thread(scraped, port)
        assert 'speculation_reports_total{engine="c"}' in text
        assert 'speculation_reports_total{engine="broken"}' not in text
        assert "speculation_engines_unreadable 1.0" in text


async def test_a_row_that_fits_no_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        rows, token = await paging.page_of(
            FairQueue(1),
            ["large", "small"],
            lambda name: service_pb2.EngineOverview(
                engine_id=name, reason="x" * (5_000 if name == "large" else 5)
            ),
            lambda name, reason: service_pb2.EngineOverview(engine_id=name, unavailable=reason),
            0,
            "",
            1_000,
        )
        assert not token
        assert "5" in rows[0].unavailable
        assert not rows[0].reason
        assert rows[1].reason
