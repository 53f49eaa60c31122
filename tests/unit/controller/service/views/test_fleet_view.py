"""Sidecars that share a real Redis see one another's engines, and survive what stands there."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from controller.service.views import fleet_summary, fleet_view, status_cache
from controller.service.views.fleet_summary import EngineSummary, decode_summary, encode_summary
from controller.service.views.fleet_view import Fleet, FleetCounts, FleetEngine, totals_of
from controller.store import redis_summaries
from lab.harness.processes import free_port
from speculation.v1 import service_pb2
from tests.support.redis_server import RedisServer
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    SteerClient,
    failure,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

INDEX = "{speculation:1}:fleet"


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(running_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """An empty one, of whose sidecars everything comes quickly."""
    monkeypatch.setattr(fleet_summary, "PUBLISH_SECONDS", 0.2)
    monkeypatch.setattr(fleet_view, "_REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(status_cache, "_REFRESH_SECONDS", 0.05)
    with running_server.client() as client:
        client.flushall()
    return running_server


@asynccontextmanager
async def fleet(
    folder: Path, server: RedisServer, count: int = 2, **settings: Any
) -> AsyncIterator[list[RunningSidecar]]:
    async with AsyncExitStack() as stack:
        sidecars = []
        for number in range(count):
            own = folder / f"pod-{number}"
            own.mkdir(exist_ok=True)
            sidecars.append(
                await stack.enter_async_context(
                    running_sidecar(own, redis_url=server.url, **settings)
                )
            )
        yield sidecars


async def seen(running: RunningSidecar, condition: Callable[[Fleet], Any]) -> Fleet:
    """The first look at the fleet that the condition holds for."""
    view = running.sidecar._fleet_view
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition(fleet := await view.current_view()):  # noqa: ASYNC110  # it is in Redis
            await asyncio.sleep(0.02)
    return fleet


def counted(running: RunningSidecar) -> FleetCounts:
    counts = running.sidecar._fleet_view.counts
    assert counts is not None
    return counts


def scraped(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        lines = str(answer.read(), "utf-8").splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def ids(fleet: Fleet) -> list[str]:
    return [engine.summary.engine_id for engine in fleet.engines]


def summary(engine_id: str = "engine-0", **changes: Any) -> EngineSummary:
    values: dict[str, Any] = {
        "engine_id": engine_id,
        "target_model": "target",
        "batch_size": 8,
        "drafter": "mtp",
        "gamma": 3,
        "link": "steered",
        "reason": "exploit",
        "seconds_since_report": 0.5,
        "accept_length": 2.5,
        "tokens_per_second": 300.0,
        "gain": 1.5,
        "generated_per_second": 300.0,
    }
    return EngineSummary(**values | changes)


def body(*engines: EngineSummary, sidecar: str = "other", every: float = 5.0) -> bytes:
    return encode_summary(sidecar, "1.0", every, engines)


def put(server: RedisServer, source: str, text: bytes | str, age_seconds: float = 1.0) -> None:
    """Writes as every client can that may write to this Redis."""
    with server.client() as client:
        now = client.time()
        assert isinstance(now, tuple)
        client.set(f"{INDEX}:{source}", text)
        client.zadd(INDEX, {source: 1000 * (now[0] - age_seconds)})


async def test_two_sidecars_see_one_another(tmp_path: Path, server: RedisServer):
    async with fleet(tmp_path, server) as (one, two):
        stream = SteerClient(one, await one.introduce("engine-a"))
        await stream.send(report_message(1))
        await stream.plan()
        await two.introduce("engine-b")
        both = ["engine-a", "engine-b"]
        for running, local in ((one, "engine-a"), (two, "engine-b")):
            snapshot = await seen(
                running, lambda f: ids(f) == both and f.engines[0].link == "steered"
            )
            assert (snapshot.shared, snapshot.trouble, snapshot.refused, snapshot.left_out) == (
                True,
                "",
                0,
                0,
            )
            assert [e.summary.engine_id for e in snapshot.engines if e.local] == [local]
        engine_summary = snapshot.engines[0].summary
        assert (engine_summary.batch_size, engine_summary.drafter, engine_summary.target_model) == (
            4,
            "mtp",
            "target",
        )
        assert engine_summary.gain is not None
        assert snapshot.engines[1].link == "away"
        assert totals_of(snapshot.engines).sidecars == 2


async def test_a_sidecar_that_stops_takes_its_engines_along(tmp_path: Path, server: RedisServer):
    async with fleet(tmp_path, server, 1) as (one,):
        own = tmp_path / "other"
        own.mkdir()
        async with running_sidecar(own, redis_url=server.url) as two:
            await two.introduce("engine-b")
            await seen(one, lambda f: ids(f) == ["engine-b"])
        await seen(one, lambda f: not f.engines)
    with server.client() as client:
        assert client.keys(f"{INDEX}*") == []


async def test_a_summary_expires(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    async with fleet(tmp_path, server, 1) as (one,):
        board = one.sidecar.store.summaries
        assert isinstance(board, redis_summaries.RedisSummaries)
        monkeypatch.setattr(board, "_kept_seconds", PATIENCE_SECONDS)
        await board.put("ab", body(summary("engine-b")))
        with server.client() as client:
            assert 0 < client.pttl(f"{INDEX}:ab") <= 1000 * PATIENCE_SECONDS
            assert client.pttl(INDEX) > 0
            await seen(one, lambda f: ids(f) == ["engine-b"])
            monkeypatch.setattr(board, "_kept_seconds", 0.3)
            await board.put("ab", body(summary("engine-b")))
            await seen(one, lambda f: not f.engines)
            # The index, too, forgets it when the next one writes.
            await board.put("cd", body())
            assert client.zscore(INDEX, "ab") is None


async def test_a_sidecar_that_is_not_heard_of_is_silent_and_its_return_ends_that(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        put(server, "ab", body(summary("engine-b")), age_seconds=10.0)
        put(server, "cd", body(summary("engine-c", generated_per_second=100.0)), age_seconds=21.0)
        snapshot = await seen(one, lambda f: len(f.engines) == 2)
        assert [engine.link for engine in snapshot.engines] == ["steered", "silent"]
        assert snapshot.engines[1].age_seconds > 20.0
        totals = totals_of(snapshot.engines)
        assert (totals.steered, totals.silent, totals.generated_per_second) == (1, 1, 300.0)
        # Its next process, on the same host.
        put(server, "ef", body(summary("engine-c")))
        again = await seen(one, lambda f: not any(e.silent for e in f.engines))
        assert ids(again) == ["engine-b", "engine-c"]


async def test_without_redis_ones_own_engines_are_still_shown_and_nobody_waits(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        await one.introduce("engine-a")
        await two.introduce("engine-b")
        await seen(one, lambda f: len(f.engines) == 2)
        server.kill()
        try:
            snapshot = await seen(one, lambda f: f.trouble)
            assert ids(snapshot) == ["engine-a"]
            assert "the store is unavailable" in snapshot.trouble
            await wait_until(lambda: counted(one).failed)
            assert (await one.status("engine-a")).engine.engine_id == "engine-a"
        finally:
            server.start()
        snapshot = await seen(one, lambda f: not f.trouble and len(f.engines) == 2)


async def test_a_redis_that_hangs_keeps_no_look_waiting(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    async with fleet(tmp_path, server, 1) as (one,):
        await one.introduce("engine-a")
        await seen(one, lambda f: f.engines and not f.trouble)
        server.pause()
        try:
            # What is seen while the answer is awaited still has no trouble.
            monkeypatch.setattr(fleet_view, "_STORE_WAIT_SECONDS", 0.0)
            await asyncio.sleep(0.1)
            snapshot = await one.sidecar._fleet_view.current_view()
            assert (ids(snapshot), snapshot.trouble) == (["engine-a"], "")
            snapshot = await seen(one, lambda f: f.trouble)
            assert "does not answer in time" in snapshot.trouble
        finally:
            server.resume()
        await seen(one, lambda f: not f.trouble)


async def test_the_call_lists_the_fleet_and_narrows_it(tmp_path: Path, server: RedisServer):
    async with fleet(tmp_path, server) as (one, two):
        await one.introduce("engine-a")
        put(server, "ab", body(summary("engine-b", overrides=("night",), more_overrides=2)))
        put(server, "cd", body(summary("engine-b", gamma=0, gain=0.5), sidecar="pod-9"))

        async def ask(words: str = "") -> service_pb2.ListFleetResponse:
            request = service_pb2.ListFleetRequest(filter=words)
            return await with_timeout(two.inspection.ListFleet(request))

        async with asyncio.timeout(PATIENCE_SECONDS):
            while len((response := await ask()).engines) < 3:  # noqa: ASYNC110  # it is in Redis
                await asyncio.sleep(0.02)
        a, b, c = response.engines
        assert (a.engine_id, a.local, a.link) == ("engine-a", False, "away")
        # Two sidecars may have engines of one name.
        assert [(e.engine_id, e.sidecar) for e in (b, c)] == [
            ("engine-b", "other"),
            ("engine-b", "pod-9"),
        ]
        assert (list(b.overrides), b.more_overrides, b.accept_length) == (["night"], 2, 2.5)
        assert (b.tokens_gained_per_second, c.tokens_gained_per_second) == (100.0, -300.0)
        totals = response.totals
        assert (totals.engines, totals.sidecars, totals.off, totals.overridden) == (3, 3, 1, 1)
        assert totals.tokens_gained_per_second == -200.0
        assert (response.shared, response.trouble) == (True, "")
        for words, count in {
            "sidecar=pod-9": 1,
            "override=night": 1,
            "nig": 1,
            "link=away": 1,
        }.items():
            assert len((await ask(words)).engines) == count, words
        code, text = await failure(ask("speed=9"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the filter names the field 'speed'" in text


HEAD = json.loads(body())
GOOD = asdict(summary("good"))
# Of a name of its own, so that it is not refused for being there twice.
BAD = GOOD | {"engine_id": "bad"}
# A text that is right, but longer than a reader takes.
TOO_LONG = body(summary("too-long")) + b" " * redis_summaries.TEXT_BYTES_MAX
POISON: Mapping[str, bytes] = {
    "no JSON": b"\xff\xfe{",
    "another JSON": b"[1]",
    "nested": b"[" * 100_000,
    "digits": b'{"format":' + b"9" * 400_000 + b"}",
    "another format": json.dumps(HEAD | {"format": "speculation-fleet/2"}).encode(),
    "a name that commands the terminal": json.dumps(HEAD | {"sidecar": "\x1b[31m"}).encode(),
    "no time": json.dumps(HEAD | {"every_seconds": 1e9}).encode(),
    "too many": json.dumps(HEAD | {"engines": [{}] * 1025}).encode(),
    "half a character": b'{"sidecar":"\\ud800"}',
}
BAD_ENGINES: Mapping[str, Any] = {
    "nothing": {},
    "no object": 7,
    "an id with a line": BAD | {"engine_id": "a\nb"},
    "an id with an end": BAD | {"engine_id": "good\n"},
    "a long id": BAD | {"engine_id": "a" * 129},
    "a drafter that commands": BAD | {"drafter": "\x1b]0;x\x07"},
    "a model turned round": BAD | {"target_model": "\u202egnp"},
    "long words": BAD | {"reason": "x" * 201},
    "text for a number": BAD | {"batch_size": "8"},
    "truth for a number": BAD | {"gamma": True},
    "a large number": BAD | {"batch_size": 10**30},
    "below zero": BAD | {"accept_length": -1.0},
    "no number": BAD | {"gain": float("nan")},
    "infinity": BAD | {"tokens_per_second": float("inf")},
    "an unknown link": BAD | {"link": "silent"},
    "an override that commands": BAD | {"overrides": ["\x1b"]},
    "many overrides": BAD | {"overrides": ["a"] * 9},
    "the same again": GOOD,
}


async def test_what_somebody_else_wrote_is_skipped_and_counted(tmp_path: Path, server: RedisServer):
    port = free_port()
    async with fleet(tmp_path, server, 1, metrics_port=port) as (one,):
        for number, text in enumerate(POISON.values()):
            put(server, f"{number:x}", text)
        engines = [GOOD, *BAD_ENGINES.values()]
        put(server, "ff", json.dumps(HEAD | {"engines": engines}))
        with server.client() as client:
            client.rpush(f"{INDEX}:aa", "a list")
            client.zadd(INDEX, {"aa": 1000 * (time.time() - 1.0)})
        put(server, "dd", TOO_LONG)
        put(server, "no source", body(summary("of-no-source")))
        put(server, "b" * 33, body(summary("of-a-long-source")))
        expected = len(POISON) + len(BAD_ENGINES) + 4
        snapshot = await seen(one, lambda f: f.engines and f.refused == expected)
        assert ids(snapshot) == ["good"]
        assert snapshot.engines[0].summary == summary("good")
        await wait_until(lambda: counted(one).written)
        metrics = await asyncio.to_thread(scraped, port)
        assert metrics["speculation_fleet_refused_entries_total"] >= expected
        assert metrics['speculation_fleet_summaries_total{outcome="written"}'] >= 1
        assert metrics['speculation_fleet_summaries_total{outcome="failed"}'] == 0


@pytest.mark.parametrize("name", POISON)
def test_each_bad_text_is_refused_by_itself(name: str):
    with pytest.raises(ValueError, match="SidecarSummary"):
        decode_summary(POISON[name])


@pytest.mark.parametrize("name", BAD_ENGINES)
def test_each_bad_engine_is_refused_by_itself(name: str):
    engines = [GOOD, BAD_ENGINES[name], GOOD | {"engine_id": "other"}]
    _, decoded_engines, refused = decode_summary(json.dumps(HEAD | {"engines": engines}).encode())
    assert [engine.engine_id for engine in decoded_engines] == ["good", "other"]
    assert refused == 1


async def test_a_key_of_another_kind_is_named(tmp_path: Path, server: RedisServer):
    with server.client() as client:
        client.set(INDEX, "x")
        async with fleet(tmp_path, server, 1) as (one,):
            snapshot = await seen(
                one, lambda f: f.trouble and f.trouble != fleet_view._NOT_READ_REASON
            )
            assert f"key {INDEX} is a string" in snapshot.trouble
            # Nothing else of the store is affected.
            assert one.sidecar.override_registry.health.ok
            client.delete(INDEX)
            await seen(one, lambda f: not f.trouble)


async def test_a_clock_of_redis_that_was_ahead_leaves_nothing_behind(
    tmp_path: Path, server: RedisServer
):
    put(server, "ab", body(summary("engine-b")), age_seconds=-1e6)
    async with fleet(tmp_path, server, 1) as (one,):
        await wait_until(lambda: counted(one).written)
        assert not (await seen(one, lambda f: not f.trouble)).engines


async def test_two_hundred_sidecars_and_one_with_two_hundred_engines(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        for number in range(200):
            put(server, f"{number:016x}", body(summary(f"engine-{number}")))
        put(server, "ff", body(*(summary(f"of-one-{number}") for number in range(200))))
        snapshot = await seen(one, lambda f: len(f.engines) == 400)
        totals = totals_of(snapshot.engines)
        assert (totals.engines, totals.sidecars, totals.steered) == (400, 201, 400)
        assert totals.generated_per_second == pytest.approx(400 * 300.0)
        assert totals.tokens_gained_per_second == pytest.approx(400 * 100.0)
        assert (snapshot.refused, snapshot.left_out) == (0, 0)


async def test_engines_beyond_what_a_view_holds_are_counted(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fleet_view, "ENGINES_MAX", 30)
    async with fleet(tmp_path, server, 1) as (one,):
        for number in range(40):
            put(server, f"{number:016x}", body(summary(f"engine-{number:03}")))
        put(server, "ff", body(*(summary(f"of-one-{number}") for number in range(50))))
        snapshot = await seen(one, lambda f: len(f.engines) + f.left_out == 90)
        assert len(snapshot.engines) == 30


async def test_no_look_reads_more_bytes_than_it_may(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_summaries, "_READ_BYTES_MAX", redis_summaries.TEXT_BYTES_MAX + 5000)
    async with fleet(tmp_path, server, 1) as (one,):
        for number in range(120):
            put(server, f"{number:016x}", body(summary(f"engine-{number:03}")))
        # A hundred texts are asked for at once, perhaps its own one among them.
        snapshot = await seen(one, lambda f: len(f.engines) + f.left_out == 120)
        assert len(snapshot.engines) in {99, 100}


def test_a_text_keeps_to_its_bounds_and_says_what_it_leaves_out():
    name = "x" * 128
    engines = [summary(name[: -len(str(n))] + str(n), target_model="é" * 200) for n in range(1100)]
    text = body(*engines)
    assert len(text) <= redis_summaries.TEXT_BYTES_MAX
    head, decoded_engines, refused = decode_summary(text)
    assert refused == 0
    assert 0 < head.left_out == 1100 - len(decoded_engines)
    assert decoded_engines == engines[: len(decoded_engines)]
    head, decoded_engines, _ = decode_summary(body(*(summary(str(n)) for n in range(1100))))
    assert (len(decoded_engines), head.left_out) == (1024, 76)


def test_totals_count_each_engine_once():
    def engine(source: str, *, silent: bool = False, **changes: Any) -> FleetEngine:
        return FleetEngine("pod", source, summary(source, **changes), 1.0, silent=silent)

    totals = totals_of([
        engine("a"),
        engine("b", gamma=0, gain=1.0),
        engine("c", link="alone", gamma=0),
        engine("d", link="away", generated_per_second=None),
        engine("e", link="waiting", generated_per_second=None, gain=None),
        engine("f", silent=True),
        engine("g", link="", unavailable="broken"),
        engine("h", gain=0.5, overrides=("o1",)),
    ])  # fmt: skip
    assert asdict(totals) == {
        "engines": 8,
        "sidecars": 8,
        "steered": 3,
        "unsteered": 2,
        "waiting": 1,
        "silent": 1,
        "unavailable": 1,
        "off": 1,
        "overridden": 1,
        "generated_per_second": 1200.0,
        "tokens_gained_per_second": 100.0 + 0.0 + 100.0 - 300.0,
    }
