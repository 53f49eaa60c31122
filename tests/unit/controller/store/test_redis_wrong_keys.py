"""Keys in Redis that are not what they should be, and a Redis whose clock goes back."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from controller.store.interface import Actor, BlobKind, Entry, StoreUnavailableError
from controller.store.redis_mirror import MirroredEntry, RedisMirror
from controller.store.redis_store import RedisStore
from tests.support.redis_server import PATIENCE_SECONDS, RedisServer
from tests.support.store_tasks import run_store_tasks

ANN = Actor("ann", "because", "uid 1000")
TAG = "{speculation:1}"
REVISION, LIVE, TRACES, AUDIT = (
    f"{TAG}:{name}" for name in ("revision", "live", "traces", "audit")
)
DAY_MS = 86_400_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as opened:
        yield opened


@asynccontextmanager
async def store_of(server: RedisServer, url: str = "") -> AsyncIterator[RedisStore]:
    store = RedisStore(url or server.url, timeout_seconds=2, reconcile_seconds=0.1)
    await store.open(lambda: None)
    async with run_store_tasks(store):
        yield store
    await store.close()


async def live(store: RedisStore) -> dict[str, Entry]:
    return {e.override_id: e for e in await store.entries() if not e.ended}


def well(store: RedisStore) -> bool:
    return store.health.ok


def dump(client: Any) -> dict[str, Any]:
    """Everything there is, byte for byte."""
    return {key: client.dump(key) for key in client.keys("*")}


def spoil(client: Any, key: str) -> None:
    """Puts a key of another type in the place of this one."""
    kept = client.type(key) != "none"
    if kept:
        client.rename(key, f"{TAG}:kept")
    client.rpush(key, "junk")


def mend(client: Any, key: str) -> None:
    client.delete(key)
    if client.exists(f"{TAG}:kept"):
        client.rename(f"{TAG}:kept", key)


@pytest.mark.parametrize("key", [REVISION, LIVE, TRACES, AUDIT])
async def test_with_a_key_of_the_wrong_type_nothing_is_changed_and_health_says_so(
    server: RedisServer, client: redis.Redis, key: str
):
    async with store_of(server) as store:
        held = await store.write("held", "1", 100.0, 0, ANN)
        spoil(client, key)
        before = dump(client)
        with pytest.raises(StoreUnavailableError, match=f"{key} is a list.*nothing was changed"):
            await store.write("ghost", "1", 100.0, 0, ANN)
        with pytest.raises(StoreUnavailableError, match=f"{key} is a list.*nothing was changed"):
            await store.clear("held", held.revision, ANN)
        # What is held stays in force, and no caller sees a ghost.
        assert set(await live(store)) == {"held"}
        assert not well(store)
        assert f"{key} is a list" in store.health.detail
        assert dump(client) == before
        mend(client, key)
        assert set(await live(store)) == {"held"}
        assert well(store), store.health.detail
        await store.write("fresh", "1", 100.0, 0, ANN)
        assert set(await live(store)) == {"held", "fresh"}
        assert [r.subject for r in await store.audit(10)] == ["fresh", "held"]


@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "9223372036854775807", ""])
async def test_a_counter_that_does_not_count_makes_the_store_unhealthy_until_it_is_mended(
    server: RedisServer, client: redis.Redis, value: str
):
    async with store_of(server) as store:
        await store.write("held", "1", 100.0, 0, ANN)
        client.set(REVISION, value)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while well(store):
                await store.entries()
                await asyncio.sleep(0.02)
        assert "is not a counter below 2^53" in store.health.detail
        with pytest.raises(StoreUnavailableError, match=r"not a counter.*nothing was changed"):
            await store.write("ghost", "1", 100.0, 0, ANN)
        assert set(await live(store)) == {"held"}
        client.set(REVISION, "9")
        assert set(await live(store)) == {"held"}
        assert well(store)
        assert (await store.write("fresh", "1", 100.0, 0, ANN)).revision == 10


async def test_an_audit_stream_that_takes_no_more_records_refuses_before_anything_is_written(
    server: RedisServer, client: redis.Redis
):
    async with store_of(server) as store:
        client.xadd(AUDIT, {"x": "y"}, id="18446744073709551615-18446744073709551615")
        before = dump(client)
        with pytest.raises(StoreUnavailableError, match=r"accepts no others.*nothing was changed"):
            await store.write("ghost", "1", 100.0, 0, ANN)
        assert dump(client) == before
        assert await live(store) == {}
        assert not well(store)


@pytest.mark.parametrize("denied", ["xadd", "set", "zadd", "zrem", "incr"])
async def test_a_user_without_the_right_to_a_command_changes_nothing(
    server: RedisServer, client: redis.Redis, denied: str
):
    client.acl_setuser(
        "limited", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"],
        commands=["+@all", f"-{denied}"],
    )  # fmt: skip
    url = server.url.replace("redis://", "redis://limited:secret@")
    async with store_of(server, url) as store:
        before = dump(client)
        with pytest.raises(StoreUnavailableError, match=r"(?i)may not use.*nothing was changed"):
            await store.write("ghost", "1", 100.0, 0, ANN)
        assert dump(client) == before
        assert await live(store) == {}
        assert not well(store)


async def test_a_connection_that_breaks_before_the_answer_is_not_called_unchanged(
    server: RedisServer, client: redis.Redis
):
    """Redis may have carried out a command whose answer never comes."""
    async with store_of(server) as store:
        await store.entries()
        client.client_pause(60_000, all=False)
        writing = asyncio.create_task(store.write("a", "1", 100.0, 0, ANN))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any("b" in c["flags"] for c in client.client_list()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(
            StoreUnavailableError, match="unknown whether it was done: retry with the same id"
        ):
            await writing
        server.kill()
        with pytest.raises(StoreUnavailableError, match="nothing was changed"):
            await store.write("a", "1", 100.0, 0, ANN)


GOODS = BlobKind("goods", sources=2, seconds=None)


async def test_a_shelf_with_a_wrong_key_takes_nothing_and_one_with_junk_goes_on(
    server: RedisServer, client: redis.Redis
):
    async with store_of(server) as store:
        client.set(f"{TAG}:goods", "junk")
        before = dump(client)
        with pytest.raises(StoreUnavailableError, match=r"goods is a string.*nothing was changed"):
            await store.blobs.put(GOODS, "aa", "01", "x")
        assert dump(client) == before
        client.delete(f"{TAG}:goods")
        client.hset(f"{TAG}:goods:aa", mapping={"07": "junk", "08": "[]", "09": "{}"})
        await store.blobs.put(GOODS, "aa", "01", "x")
        await store.blobs.put(GOODS, "aa", "02", "x")
        assert {i.source for i in await store.blobs.items(GOODS, "aa")} == {"01", "02"}
        # Written by a foreign client while no sidecar writes.
        junk: dict[Any, Any] = {
            "07": b"\xff", b"\xfe": "{}", "0a": '{"at": 1, "text": 5}', "not hex": "{}",
            "0b": '{"at": 1e300, "text": "x"}', "0c": '{"at": 1, "text": "\\ud800"}',
            "0d": "x" * (17 * 1024 * 1024),
        }  # fmt: skip
        client.hset(f"{TAG}:goods:aa", mapping=junk)
        names: dict[Any, Any] = {b"\xff": 1, "../x": 2, "x" * 100_000: 3}
        client.zadd(f"{TAG}:goods", names)
        client.set(f"{TAG}:goods:bb", "of another type")
        assert {i.source for i in await store.blobs.items(GOODS, "aa")} == {"01", "02"}
        assert await store.blobs.names(GOODS) == ["aa"]
        assert await store.blobs.items(GOODS, "bb") == []
        assert store.health.skipped["goods"] == len(junk) + 3 + 1
        assert store.health.ok


def set_clock_back(client: Any, ms: int) -> None:
    """As if Redis's clock had been that far ahead when all of this was written."""
    for key in (LIVE, TRACES):
        for member, score in client.zrange(key, 0, -1, withscores=True):
            if score != float("inf"):
                client.zadd(key, {member: score + ms})
            entry = f"{TAG}:entry:{member}"
            text = json.loads(client.get(entry)) | {}
            text["created"] += ms / 1000
            left = client.pttl(entry)
            client.set(entry, json.dumps(text), px=left + ms if left > 0 else None)
    last = client.xrevrange(AUDIT, count=1)[0]
    number = int(last[0].partition("-")[0]) + ms
    client.xadd(AUDIT, last[1], id=f"{number}-0")


async def test_a_redis_whose_clock_goes_back_makes_no_override_longer_than_was_granted(
    server: RedisServer, client: redis.Redis
):
    async with store_of(server) as store:
        await store.write("hour", "1", 3600.0, 0, ANN)
        await store.write("short", "2", 1.0, 0, ANN)
        await store.write("ever", "3", None, 0, ANN)
    set_clock_back(client, 30 * DAY_MS)
    async with store_of(server) as store:
        live_overrides = await live(store)
        assert live_overrides["hour"].remaining_seconds == pytest.approx(3600, abs=30)
        assert live_overrides["ever"].remaining_seconds is None
        # It runs from then on: looked at again, the short one ends.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "short" in await live(store):
                pass
        assert set(await live(store)) == {"hour", "ever"}
        await store.write("new", "4", 50.0, 0, ANN)
        assert (await live(store))["new"].remaining_seconds == pytest.approx(50, abs=10)
    assert client.pttl(f"{TAG}:entry:hour") < 3600_000 + 120_000


async def test_a_mirror_from_a_clock_ahead_gives_no_override_more_than_it_had_left(
    server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    mirror, real = tmp_path / "mirror", time.time
    store = RedisStore(server.url, mirror)
    await store.open(lambda: None)
    await store.write("hour", "1", 3600.0, 0, ANN)
    await store.close()
    server.kill()
    monkeypatch.setattr(time, "time", lambda: real() - 30 * 86_400)
    store = RedisStore(server.url, mirror)
    await store.open(lambda: None)
    live_overrides = await live(store)
    await store.close()
    assert live_overrides["hour"].remaining_seconds == pytest.approx(3600, abs=30)
    assert "clock_went_back" in capsys.readouterr().out


@pytest.mark.parametrize("counter", [None, "1"])
async def test_a_counter_that_was_deleted_or_set_back_undoes_no_change(
    server: RedisServer, client: redis.Redis, counter: str | None
):
    """Whoever holds a higher revision would take the change for a loss, and put back the entry."""
    async with store_of(server) as one, store_of(server) as two:
        entries = [await one.write(f"o{number}", "1", None, 0, ANN) for number in range(3)]
        assert set(await live(two)) == {"o0", "o1", "o2"}
        if counter is None:
            client.delete(REVISION)
        else:
            client.set(REVISION, counter)
        await one.clear("o2", entries[2].revision, ANN)
        changed = await one.write("o1", "2", None, entries[1].revision, ANN)
        fresh = await one.write("fresh", "3", None, 0, ANN)
        assert fresh.revision > changed.revision > entries[2].revision
        for store in (one, two, one):
            live_overrides = await live(store)
            assert {name: entry.body for name, entry in live_overrides.items()} == {
                "o0": "1", "o1": "2", "fresh": "3",
            }  # fmt: skip


async def test_a_look_raises_a_counter_that_was_deleted(server: RedisServer, client: redis.Redis):
    async with store_of(server) as store:
        entry = await store.write("a", "1", None, 0, ANN)
        client.delete(REVISION)
        await store.entries()
        assert (await store.write("b", "2", None, 0, ANN)).revision > entry.revision


ODD = {
    "NaN": b'{"revision":7,"body":"1","created":9999999999,"ended":"","more":NaN}',
    "hexadecimal": b'{"revision":0x7,"body":"1","created":1,"ended":""}',
    "large": b'{"revision":4503599627370495,"body":"1","created":1,"ended":""}',
    "half a surrogate pair": b'{"revision":7,"body":"\xed\xa0\x80","created":1,"ended":""}',
    "a longer form": b'{"revision":7,"body":"\xe0\x80\x80","created":1,"ended":""}',
    "beyond the last": b'{"revision":7,"body":"\xf4\x90\x80\x80","created":1,"ended":""}',
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
async def test_an_entry_that_redis_reads_otherwise_than_python_spoils_nothing(
    server: RedisServer, client: redis.Redis, text: bytes
):
    async with store_of(server) as store:
        await store.write("good", "1", None, 0, ANN)
        client.set(f"{TAG}:entry:odd", text)
        client.zadd(LIVE, {"odd": "inf"})
        # As of a Redis whose clock was ahead: every entry from then is set right.
        client.xadd(AUDIT, {"a": "b"}, id=f"{int(time.time() * 1000) + DAY_MS}-0")
        live_overrides = await live(store)
        assert "good" in live_overrides
        assert well(store)
        assert ("odd" in live_overrides) != ("odd" in store.health.unusable)
        await store.clear(
            "odd", live_overrides["odd"].revision if "odd" in live_overrides else 0, ANN
        )
        assert set(await live(store)) == {"good"}
        assert not store.health.unusable


async def test_an_entry_with_the_longest_id_that_cannot_be_read_can_be_cleared(
    server: RedisServer, client: redis.Redis
):
    name = "x" * 128
    async with store_of(server) as store:
        client.set(f"{TAG}:entry:{name}", "no entry")
        client.zadd(LIVE, {name: "inf"})
        await store.entries()
        assert list(store.health.unusable) == [name]
        await store.clear(name, 0, ANN)
        await store.entries()
        assert not store.health.unusable


def test_what_has_run_out_as_the_mirror_is_written_is_not_without_an_end(tmp_path: Path):
    mirror = RedisMirror(tmp_path / "fleet.json")
    mirror.write({"a": MirroredEntry("a", 1, "1", time.monotonic() - 0.01, 1.0, "")})
    assert mirror.read()[0] == {}
