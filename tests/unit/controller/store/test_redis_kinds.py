"""Sentinel and Cluster: real ones, as small as they come."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controller.store.interface import Actor, Entry, StoreUnavailableError
from controller.store.redis_client import RedisUrlError, connect
from controller.store.redis_store import RedisStore
from lab.harness.ports import free_port
from tests.support.kept_tasks import kept_running
from tests.support.redis_server import PATIENCE_SECONDS, RedisServer

ANN = Actor("ann", "because", "uid 1000")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisServer]:
    """One node that holds every slot."""
    port = free_port()
    while port > 55_000:
        port = free_port()
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with RedisServer(tmp_path / "node", *options, port=port) as node:
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            end = time.monotonic() + PATIENCE_SECONDS
            while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                if "ok" in str(client.cluster("INFO")) or time.monotonic() > end:
                    break
                time.sleep(0.05)
        yield node


async def live(store: RedisStore) -> dict[str, Entry]:
    return {e.override_id: e for e in await store.entries() if not e.ended}


async def written(store: RedisStore, name: str) -> Entry:
    """Tries as an operator does who is told that the store is away."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await store.write(name, "1", 100.0, 0, ANN)
            except StoreUnavailableError:
                await asyncio.sleep(0.2)


async def keeps_summaries(one: RedisStore, two: RedisStore) -> None:
    # Others may write what is no UTF-8.
    await one.summaries.put("ab", b"\xff")
    found = await two.summaries.read()
    assert [(item.source, item.body) for item in found.found] == [("ab", b"\xff")]
    await two.summaries.remove("ab")
    assert not (await one.summaries.read()).found


async def test_a_cluster_keeps_its_promises(cluster: RedisServer):
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    one, two = RedisStore(url, reconcile_seconds=0.2), RedisStore(url, reconcile_seconds=0.2)
    news = asyncio.Event()
    await one.open(lambda: None)
    await two.open(news.set)
    async with kept_running(one), kept_running(two):
        entry = await written(one, "a")
        async with asyncio.timeout(120):
            while "a" not in await live(two):
                await news.wait()
                news.clear()
        await two.clear("a", entry.revision, ANN)
        assert await live(one) == {}
        assert [r.action for r in await one.audit(5)] == ["clear", "set"]
        await keeps_summaries(one, two)
    await one.close()
    await two.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """(primary, replica, the sentinel that watches them)."""
    with RedisServer(tmp_path / "one") as one, RedisServer(tmp_path / "two") as two:
        with two.client() as client:
            client.replicaof("127.0.0.1", one.port)
        folder = tmp_path / "sentinel"
        folder.mkdir()
        (folder / "sentinel.conf").write_text(
            f"dir {folder}\n"
            f"sentinel monitor fleet 127.0.0.1 {one.port} 1\n"
            "sentinel down-after-milliseconds fleet 500\n"
            "sentinel failover-timeout fleet 3000\n"
        )
        with RedisServer(folder, kind="sentinel") as sentinel:
            end = time.monotonic() + PATIENCE_SECONDS
            with redis.Redis(port=sentinel.port, decode_responses=True) as client:
                while not client.execute_command("SENTINEL", "REPLICAS", "fleet"):
                    assert time.monotonic() < end
                    time.sleep(0.1)
            yield one, two, sentinel


async def test_after_a_fail_over_everything_is_there_and_can_be_changed(
    watched: tuple[RedisServer, RedisServer, RedisServer],
):
    primary, _, sentinel = watched
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet/0"
    store = RedisStore(url, timeout_seconds=0.5, reconcile_seconds=0.2)
    await store.open(lambda: None)
    async with kept_running(store):
        await written(store, "before")
        await keeps_summaries(store, store)
        primary.kill()
        assert set(await live(store)) == {"before"}
        await written(store, "after")
        assert set(await live(store)) == {"before", "after"}
        assert store.health.ok
    await store.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://x", "the scheme is not known"),
        ("redis+other://x", "the scheme is not known"),
        ("redis://", "no host"),
        ("redis+sentinel://host:1", "has to name the service"),
        ("redis://:secret@host:port/0", "Port"),
        ("redis://:secret@host/0?pasword=secret", "an option that the Redis client does not know"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str, text: str):
    with pytest.raises(RedisUrlError, match=text) as error:
        connect(url, 1.0)
    assert "secret" not in str(error.value)
