"""Whatever Redis answers to any command: a typed error or a success, and what is held stays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controller.store import redis_replies
from controller.store.interface import (
    PROFILES,
    Actor,
    ConflictError,
    StoreError,
    StoreUnavailableError,
)
from controller.store.redis_store import RedisStore
from tests.support.fake_redis import JUNK, FakeRedis, handshake, resp
from tests.support.redis_server import RedisServer
from tests.support.store_tasks import run_store_tasks

ANN = Actor("ann", "because", "uid 1000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def calls_of(store: RedisStore) -> list[Callable[[], Awaitable[Any]]]:
    """All that a sidecar asks of its store."""
    return [
        lambda: store.write("b", "2", 100.0, 0, ANN),
        lambda: store.clear("held", 1, ANN),
        lambda: store.record("measure", "engine-0", ANN),
        lambda: store.audit(10),
        lambda: store.blobs.put(PROFILES, "aa", "01", "x"),
        lambda: store.blobs.items(PROFILES, "aa"),
        lambda: store.blobs.names(PROFILES),
        lambda: store.summaries.put("ab", b"x"),
        store.summaries.read,
        lambda: store.summaries.remove("ab"),
    ]


@pytest.mark.parametrize("kind", JUNK)
async def test_whatever_redis_answers_is_a_typed_error_and_what_is_held_stays(
    server: RedisServer, kind: str, monkeypatch: pytest.MonkeyPatch
):
    with server.client() as client:
        client.flushall()
    junk = False

    def reply(name: str, _: object) -> bytes | None:
        return handshake(name) or (JUNK[kind] if junk else None)

    monkeypatch.setattr("controller.store.redis_summaries._PAUSE_SECONDS", (0.0, 0.0))
    async with FakeRedis(reply, server.port) as fake:
        store = RedisStore(fake.url, timeout_seconds=0.05 if kind in _SILENT else 2.0)
        await store.open(lambda: None)
        try:
            async with asyncio.timeout(30):
                while True:  # a machine under load may not answer in the short time above
                    # Nor be known to have done it.
                    with contextlib.suppress(StoreUnavailableError, ConflictError):
                        await store.write("held", "1", None, 0, ANN)
                    if await store.entries():
                        break
            junk = True
            assert [entry.override_id for entry in await store.entries()] == ["held"]
            for call in calls_of(store):
                with contextlib.suppress(StoreError):
                    await call()
            with pytest.raises(StoreUnavailableError):
                await store.write("c", "3", 100.0, 0, ANN)
            assert not store.health.ok
            assert store.health.detail.isprintable()
            junk = False
            assert "held" in {entry.override_id for entry in await store.entries()}
        finally:
            await store.close()


# With these the client waits for more.
_SILENT = {"endless list", "truncated", "nothing", "not RESP"}


async def test_a_store_that_only_answers_junk_can_be_opened_and_closed(tmp_path: Path):
    async def opened_and_closed(kind: str) -> None:
        async with FakeRedis(lambda *_: JUNK[kind]) as fake:
            store = RedisStore(fake.url, tmp_path / f"mirror of {kind}", timeout_seconds=0.1)
            await store.open(lambda: None)
            # Which says that no task of it fails.
            async with run_store_tasks(store):
                assert await store.entries() == [], kind
                # Of one reply only the entries in it are junk.
                assert kind == "entries" or not store.health.ok, kind
            await store.close()

    await asyncio.gather(*map(opened_and_closed, JUNK))


async def test_of_a_reply_with_entries_that_are_none_the_others_are_taken():
    good = b'{"revision":3,"body":"1","created":1,"ended":""}'
    rows = [b"good", good, b"-1", b"bad", good[:-1], b"-1", [], good, b"-1", b"late", good, b"x"]
    answer = resp([b"", b"3", 0, 0, 0, [], rows])
    async with FakeRedis(lambda name, _: handshake(name) or answer) as fake:
        store = RedisStore(fake.url, timeout_seconds=30)
        await store.open(lambda: None)
        try:
            assert [entry.override_id for entry in await store.entries()] == ["good"]
            assert set(store.health.unusable) == {"bad", "[]", "late"}
            assert store.health.unusable_count == 3
            assert store.health.ok
        finally:
            await store.close()


async def test_junk_in_place_of_a_subscription_does_not_end_the_listening(server: RedisServer):
    async def listened(junk: bytes) -> None:
        subscribed = asyncio.Event()

        def reply(name: str, _: object) -> bytes | None:
            if name != "SUBSCRIBE":
                return None
            subscribed.set()
            return junk

        async with FakeRedis(reply, server.port) as fake:
            store = RedisStore(fake.url, reconcile_seconds=60)
            await store.open(lambda: None)
            # Which says that no task of it fails.
            async with run_store_tasks(store):
                await asyncio.wait_for(subscribed.wait(), 60)
                await asyncio.sleep(0.05)
            await store.close()

    await asyncio.gather(*map(listened, JUNK.values()))


async def test_a_reply_that_is_too_large_is_refused_before_it_is_held(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redis_replies, "REPLY_BYTES_MAX", 10_000)
    async with opened(server) as store:
        await store.write("a", "1", None, 0, ANN)
        with server.client() as client:
            client.set("{speculation:1}:revision", "1" * 100_000)
        with pytest.raises(StoreUnavailableError, match="its reply cannot be read"):
            await store._ask(lambda: store._client.get("{speculation:1}:revision"), lambda _: None)
        with server.client() as client:
            client.set("{speculation:1}:revision", "5")
        await store.write("b", "1", None, 0, ANN)


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[RedisStore]:
    with server.client() as client:
        client.flushall()
    store = RedisStore(server.url)
    await store.open(lambda: None)
    try:
        yield store
    finally:
        await store.close()
