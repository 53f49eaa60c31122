"""Redis slow, gone, emptied, full, read-only: held overrides stay in force, and nothing is lost."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from controller.store import redis_mirror as held_module
from controller.store.interface import (
    LIVE_ENTRIES_MAX,
    Actor,
    ConflictError,
    Entry,
    StoreFullError,
    StoreUnavailableError,
)
from controller.store.redis_store import RedisStore
from controller.store.redis_url import RedisAccess
from tests.support.redis_server import PATIENCE_SECONDS, RedisServer
from tests.support.store_tasks import run_store_tasks

ANN = Actor("ann", "because", "uid 1000")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@asynccontextmanager
async def store_of(
    server: RedisServer, mirror: Path | None = None, **options: Any
) -> AsyncIterator[tuple[RedisStore, asyncio.Event]]:
    """A store, and the event that it sets when there is news."""
    settings = {"timeout_seconds": PATIENCE_SECONDS, "reconcile_seconds": 0.1} | options
    store = RedisStore(server.url, mirror, **settings)
    news = asyncio.Event()
    await store.open(news.set)
    async with run_store_tasks(store):
        yield store, news
    await store.close()


async def live(store: RedisStore) -> dict[str, Entry]:
    return {e.override_id: e for e in await store.entries() if not e.ended}


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is asked is not in this process
            await asyncio.sleep(0.02)


async def test_while_redis_is_gone_what_is_held_goes_on_and_writes_are_refused(
    server: RedisServer, tmp_path: Path
):
    async with store_of(server, tmp_path / "mirror") as (store, _):
        await store.write("a", "1", 100.0, 0, ANN)
        server.kill()
        assert set(await live(store)) == {"a"}
        assert not store.health.ok
        assert "the local copy of the overrides stays in force" in store.health.detail
        with pytest.raises(StoreUnavailableError):
            await store.write("b", "2", 100.0, 0, ANN)
        with pytest.raises(StoreUnavailableError):
            await store.clear("a", 1, ANN)
        assert set(await live(store)) == {"a"}
        server.start()
        await soon(lambda: store.health.ok)


async def test_a_sidecar_that_starts_while_redis_is_gone_begins_with_its_mirror(
    server: RedisServer, tmp_path: Path
):
    async with store_of(server, tmp_path / "mirror") as (store, _):
        await store.write("short", "1", 0.3, 0, ANN)
        await store.write("long", "2", 100.0, 0, ANN)
        await store.write("ever", "3", None, 0, ANN)
    server.kill()
    await asyncio.sleep(0.4)
    async with store_of(server, tmp_path / "mirror") as (store, _):
        live_overrides = await live(store)
        assert set(live_overrides) == {"long", "ever"}
        assert live_overrides["long"].remaining_seconds == pytest.approx(99.5, abs=30)
        assert not store.health.ok
    async with store_of(server) as (store, _):
        assert await live(store) == {}


async def test_a_redis_that_comes_back_empty_gets_everything_back(
    server: RedisServer, tmp_path: Path
):
    async with store_of(server, tmp_path / "a") as (one, _), store_of(server) as (two, _):
        kept = await one.write("kept", "1", 100.0, 0, ANN)
        ended = await one.write("ended", "2", 100.0, 0, ANN)
        await two.clear("ended", ended.revision, ANN)
        await one.entries()
        server.kill()
        server.start()
        async with asyncio.timeout(60):
            while any([set(await live(store)) != {"kept"} for store in (one, two)]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for store in (one, two):
            assert store.health.ok
            assert (await live(store))["kept"].etag == kept.etag
        # The id that had ended is still taken, and revisions continue from where they were.
        with pytest.raises(ConflictError):
            await two.write("ended", "2", 100.0, 0, ANN)
        fresh = await two.write("fresh", "3", 100.0, 0, ANN)
        assert fresh.revision > ended.revision
        actions = [r.action for r in await one.audit(10)]
        assert actions.count("restore") == 2


async def test_a_lost_clear_is_put_back_too(server: RedisServer):
    """A fail-over to a replica that has the override, but not its end."""
    async with store_of(server) as (one, _):
        entry = await one.write("a", "1", 100.0, 0, ANN)
        with server.client() as client:
            entry_key = next(key for key in client.keys("*") if key.endswith(":entry:a"))
            live_key = next(key for key in client.keys("*") if key.endswith(":live"))
            old_text, old_score = client.get(entry_key), client.zscore(live_key, "a")
        await one.clear("a", entry.revision, ANN)
        with server.client() as client:
            client.set(entry_key, old_text, px=100_000)
            client.zadd(live_key, {"a": old_score})
            client.zrem(live_key.replace(":live", ":traces"), "a")
            client.set(live_key.replace(":live", ":revision"), entry.revision)
        assert await live(one) == {}
        async with store_of(server) as (two, _):
            assert await live(two) == {}


async def test_two_sidecars_see_each_others_changes_before_they_would_ask(server: RedisServer):
    async with (
        store_of(server, reconcile_seconds=3600.0) as (one, _),
        store_of(server, reconcile_seconds=3600.0) as (two, news),
    ):
        with server.client() as client:
            await soon(lambda: listeners(client) == 2)
        for number in range(10):
            news.clear()
            await one.write(f"o{number}", "x", 100.0, 0, ANN)
            while f"o{number}" not in await live(two):
                await asyncio.wait_for(news.wait(), PATIENCE_SECONDS)
                news.clear()


def listeners(client: redis.Redis) -> int:
    """Stores that are notified of changes."""
    return sum(count for _, count in client.pubsub_numsub(*client.pubsub_channels()))


async def test_a_message_that_was_missed_does_not_matter(server: RedisServer):
    async with store_of(server) as (one, _), store_of(server) as (two, news):
        await asyncio.sleep(0.2)
        await two.entries()
        with server.client() as client:
            client.client_kill_filter(_type="pubsub")
            # No listener is back before this is over.
            await one.write("a", "1", 100.0, 0, ANN)
        news.clear()
        await asyncio.wait_for(news.wait(), PATIENCE_SECONDS)
        assert set(await live(two)) == {"a"}


async def test_a_redis_that_does_not_answer_is_waited_for_only_so_long(server: RedisServer):
    async with store_of(server, timeout_seconds=0.5) as (store, _):
        await store.write("a", "1", 100.0, 0, ANN)
        server.pause()
        try:
            began = time.monotonic()
            assert set(await live(store)) == {"a"}
            with pytest.raises(StoreUnavailableError, match="it is unknown whether it was done"):
                await store.write("b", "2", 100.0, 0, ANN)
            assert time.monotonic() - began < PATIENCE_SECONDS
        finally:
            server.resume()
        await soon(lambda: store.health.ok)


async def test_a_redis_that_takes_no_writes_refuses_and_says_why(server: RedisServer):
    async with store_of(server) as (store, _):
        await store.write("a", "1", 100.0, 0, ANN)
        with server.client() as client:
            client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailableError, match="out of memory"):
            await store.write("b", "2", 100.0, 0, ANN)
        assert set(await live(store)) == {"a"}
        assert not store.health.ok
        with server.client() as client:
            client.config_set("maxmemory", "0")
            client.replicaof("127.0.0.1", 1)
        with pytest.raises(StoreUnavailableError, match="read-only"):
            await store.write("b", "2", 100.0, 0, ANN)
        with server.client() as client:
            client.replicaof("NO", "ONE")
        await store.write("b", "2", 100.0, 0, ANN)
        assert store.health.ok


@pytest.mark.parametrize("skew", [-300.0, 300.0])
async def test_a_sidecar_whose_clock_is_wrong_neither_kills_nor_keeps_an_override(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float
):
    async with store_of(server) as (right, _):
        await right.write("long", "1", 60.0, 0, ANN)
        await right.write("short", "2", 5.0, 0, ANN)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + skew)
        async with store_of(server, tmp_path / "mirror") as (wrong, _):
            live_overrides = await live(wrong)
            assert live_overrides["long"].remaining_seconds == pytest.approx(60, abs=30)
            assert set(live_overrides) == {"long", "short"}
            await wrong.write("own", "3", 0.5, 0, ANN)
            # Sooner than the wrong clock would have it.
            async with asyncio.timeout(120):
                for store in (right, wrong):
                    while set(await live(store)) != {"long"}:  # noqa: ASYNC110  # Redis ends it
                        await asyncio.sleep(0.05)


async def test_cut_off_for_long_a_sidecar_does_not_bring_back_what_was_cleared(
    server: RedisServer, tmp_path: Path
):
    async with store_of(server, tmp_path / "cut") as (cut, _):
        entry = await cut.write("a", "1", None, 0, ANN)
    # While it is away another one clears it; when it is back it has missed it all.
    async with store_of(server) as (other, _):
        await other.clear("a", entry.revision, ANN)
    async with store_of(server, tmp_path / "cut") as (cut, _):
        assert await live(cut) == {}
    # Away for longer than traces are kept: what Redis no longer knows is not put back.
    async with store_of(server, tmp_path / "old") as (old, _):
        await old.write("b", "1", None, 0, ANN)
    with server.client() as client:
        client.flushall()
    async with store_of(server, tmp_path / "old") as (old, _):
        pass
    mirror = held_module.RedisMirror(tmp_path / "very-old")
    now = time.monotonic()
    entries = {"c": held_module.MirroredEntry("c", 3, "1", float("inf"), 0.0, "")}
    mirror.write(entries)
    store = RedisStore(server.url, tmp_path / "very-old")
    await asyncio.to_thread(lambda: None)
    store._confirmed_at = now - 8 * 86_400  # as if written eight days ago
    await store.open(lambda: None)
    try:
        assert "c" not in await live(store)
    finally:
        await store.close()


async def test_a_mirror_that_is_damaged_is_taken_as_none(server: RedisServer, tmp_path: Path):
    async with store_of(server, tmp_path / "mirror") as (store, _):
        await store.write("a", "1", 100.0, 0, ANN)
    mirror = tmp_path / "mirror"
    mirror.write_bytes(mirror.read_bytes()[:-9] + b"nonsense}")
    server.kill()
    async with store_of(server, mirror) as (store, _):
        assert await live(store) == {}


_NO_ENTRIES: tuple[str | bytes, ...] = (
    b"\xff", b'{"revision":5,"body":"\xff\xfe","created":1,"ended":""}', "9" * 100_000,
    '{"revision": 1, "body": "\\ud800", "created": 1, "ended": ""}',
    '{"revision": 1.5, "body": "1", "created": 1, "ended": ""}',
    '{"revision": 1, "body": "1", "created": 1e15, "ended": ""}',
    "", "{", "[]", "7", "\xff", '"text"', "null", "[" * 2000, "{}",
    '{"revision": "x", "body": "1", "created": 1, "ended": ""}',
    '{"revision": 1, "body": 5, "created": 1, "ended": ""}',
    '{"revision": 1, "body": "1", "created": 1, "ended": null}',
    '{"revision": 1, "body": "1", "created": 1e400, "ended": ""}',
    '{"revision": 1e400, "body": "1", "created": 1, "ended": ""}',
)  # fmt: skip


@pytest.mark.parametrize("text", _NO_ENTRIES)
async def test_an_entry_that_is_none_stops_nobody_and_is_put_right(
    server: RedisServer, text: str | bytes
):
    """By whoever still holds it, or by writing it again."""
    key = "{speculation:1}:entry:"
    async with store_of(server, reconcile_seconds=60) as (holder, _):
        await holder.write("held", "1", None, 0, ANN)
        await holder.write("good", "2", 100.0, 0, ANN)
        with server.client() as client:
            client.set(key + "held", text)
            client.set(key + "stray", text)
            client.zadd("{speculation:1}:live", {"stray": "inf"})
        async with store_of(server) as (fresh, _):
            assert set(await live(fresh)) == {"good"}
            assert fresh.health.ok, fresh.health.detail
            # An empty text counts as none at all.
            if text:
                assert set(fresh.health.unusable) >= {"held", "stray"}
                assert fresh.health.unusable_count == 2
                assert fresh.health.skipped["override"] >= 2
            await fresh.write("stray", "3", 100.0, 0, ANN)
            assert set(await live(holder)) == {"held", "good", "stray"}
            assert holder.health.ok, holder.health.detail
            assert set(await live(fresh)) == {"held", "good", "stray"}
            await fresh.clear("held", (await live(fresh))["held"].revision, ANN)
            assert set(await live(holder)) == {"good", "stray"}
            assert holder.health.unusable_count == 0


async def test_what_cannot_be_read_can_be_cleared(server: RedisServer):
    async with store_of(server) as (store, _):
        with server.client() as client:
            client.set("{speculation:1}:entry:bad", b"\xff")
            client.zadd("{speculation:1}:live", {"bad": "inf", b"\xfe\xff": "inf"})
            client.set(b"{speculation:1}:entry:\xfe\xff", "{}")
        await store.entries()
        assert set(store.health.unusable) == {"bad", r"\xfe\xff"}
        await store.clear("bad", 0, ANN)
        ended = {entry.override_id: entry.ended for entry in await store.entries()}
        assert ended == {"bad": "cleared"}
        assert set(store.health.unusable) == {r"\xfe\xff"}


async def test_of_more_entries_than_can_be_in_force_the_newest_are_taken_and_the_rest_counted(
    server: RedisServer,
):
    """Unreadable ones, however many, take no place of theirs."""
    total = 2 * LIVE_ENTRIES_MAX + 7
    async with store_of(server, reconcile_seconds=60) as (store, _):
        with server.client() as client, client.pipeline() as pipe:
            for number in range(total):
                text = {"revision": number + 1, "body": "1", "created": 1.0, "ended": ""}
                pipe.set(f"{{speculation:1}}:entry:o{number}", json.dumps(text))
                pipe.zadd("{speculation:1}:live", {f"o{number}": time.time() * 1000 + 1e6 - number})
            # JSON of the right form, of newer revisions, and not UTF-8.
            junk = b'{"revision": 9999, "body": "\xff", "created": 1, "ended": ""}'
            for number in range(1000):
                pipe.set(f"{{speculation:1}}:entry:junk{number}", junk)
                pipe.zadd("{speculation:1}:live", {f"junk{number}": "inf"})
            pipe.execute()
        live_overrides = await live(store)
        assert set(live_overrides) == {f"o{number}" for number in range(7, total)}
        assert store.health.unusable_count == 1007
        assert store.health.unusable["7 others"]
        assert len(store.health.unusable) == 21
        with pytest.raises(StoreFullError):
            await store.write("new", "1", 100.0, 0, ANN)
        # One that is there can be replaced, and cleared.
        entry = await store.write("o50", "2", 100.0, live_overrides["o50"].revision, ANN)
        await store.clear("o50", entry.revision, ANN)


async def test_two_sidecars_that_set_at_once_do_not_go_beyond_the_limit(server: RedisServer):
    async with (
        store_of(server) as (one, _),
        store_of(server) as (two, _),
    ):
        done: list[Entry | BaseException] = []
        for first in range(0, LIVE_ENTRIES_MAX + 20, 55):
            writing = (
                (one, two)[number % 2].write(f"o{number}", "1", None, 0, ANN)
                for number in range(first, first + 55)
            )
            done += await asyncio.gather(*writing, return_exceptions=True)
        assert sum(isinstance(item, Entry) for item in done) == LIVE_ENTRIES_MAX
        assert sum(isinstance(item, StoreFullError) for item in done) == 20
        assert len(await live(one)) == LIVE_ENTRIES_MAX


def _record(**changes: Any) -> dict[str, Any]:
    names = ("action", "subject", "author", "reason", "origin", "before", "after")
    return {"at": "1.5"} | dict.fromkeys(names, "x") | changes


_NO_RECORDS: tuple[dict[Any, Any], ...] = (
    {"a": "b"}, _record(at="nan"), _record(at="soon"), _record(at="-1"), _record(at="1e300"),
    _record(reason=b"\xff"), _record(more="x"),
)  # fmt: skip


async def test_records_of_the_audit_that_are_none_are_skipped_and_counted(server: RedisServer):
    async with store_of(server) as (store, _):
        first = await store.write("a", "1", 100.0, 0, ANN)
        with server.client() as client, client.pipeline() as pipe:
            for number in range(1200):
                pipe.xadd("{speculation:1}:audit", _NO_RECORDS[number % len(_NO_RECORDS)])
                if number % 100 == 0:
                    pipe.xadd("{speculation:1}:audit", _record(subject="a", action=str(number)))
            pipe.xadd("{speculation:1}:audit", _record(before="x" * 300_000))
            pipe.execute()
        await store.clear("a", first.revision, ANN)
        kept = [str(number) for number in range(1100, -1, -100)]
        whole = ["clear", *kept, "set"]
        assert [record.action for record in await store.audit(100)] == whole
        assert store.health.skipped["audit"] == 1201
        assert [record.action for record in await store.audit(100, "a")] == whole
        # In pages, each from where the one before ended.
        paged: list[str] = []
        before = ""
        while page := await store.audit(3, "", before):
            paged += [record.action for record in page]
            before = page[-1].sequence
        assert paged == whole


async def test_an_entry_that_is_none_ends_as_any_other(server: RedisServer):
    async with store_of(server) as (store, _):
        await store.write("a", "1", 0.3, 0, ANN)
        with server.client() as client:
            client.set("{speculation:1}:entry:a", "nonsense")
        await asyncio.sleep(0.5)
        assert await live(store) == {}
        assert store.health.ok, store.health.detail
        assert [record.action for record in await store.audit(5)] == ["expire", "set"]


async def test_a_key_of_another_kind_stops_nobody(server: RedisServer):
    async with store_of(server) as (store, _):
        with server.client() as client:
            client.rpush("{speculation:1}:entry:a", "x")
            client.zadd("{speculation:1}:live", {"a": "inf"})
        await store.write("b", "1", 100.0, 0, ANN)
        assert set(await live(store)) == {"b"}
        await store.write("a", "1", 100.0, 0, ANN)
        assert set(await live(store)) == {"a", "b"}


async def test_a_password_in_a_file_may_rotate(server: RedisServer, tmp_path: Path):
    secret = tmp_path / "password"
    secret.write_text("first\n")
    with server.client() as client:
        client.config_set("requirepass", "first")
    async with store_of(server, access=RedisAccess(password_file=secret)) as (store, _):
        await store.write("a", "1", 100.0, 0, ANN)
        with server.client(password="first") as admin:
            admin.config_set("requirepass", "second")
            secret.write_text("second\n")
            admin.client_kill_filter(_type="normal", skipme=True)
        async with asyncio.timeout(60):
            while "b" not in await live(store):
                try:
                    await store.write("b", "2", 100.0, 0, ANN)
                except StoreUnavailableError:
                    await asyncio.sleep(0.1)
    assert "second" not in store.health.detail


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 100_000, None])
async def test_a_password_file_without_a_password_is_a_store_that_is_away(
    server: RedisServer, tmp_path: Path, content: bytes | None
):
    secret = tmp_path / "password"
    secret.write_text("first\n")
    with server.client() as client:
        client.config_set("requirepass", "first")
    async with store_of(server, access=RedisAccess(password_file=secret)) as (store, _):
        with server.client(password="first") as admin:
            if content is None:
                secret.unlink()
            else:
                secret.write_bytes(content)
            admin.client_kill_filter(_type="normal", skipme=True)
        message = ""
        async with asyncio.timeout(60):
            # The first write meets the connection that was killed.
            while f"password file {secret}: " not in message:
                with pytest.raises(StoreUnavailableError) as refused:
                    await store.write("a", "1", 100.0, 0, ANN)
                message = str(refused.value)
        secret.write_text("first\n")
        assert (await store.write("a", "1", 100.0, 0, ANN)).body == "1"


async def test_asking_costs_two_commands_a_second_or_so_whatever_the_engines(server: RedisServer):
    async with store_of(server, reconcile_seconds=0.5) as (store, _):
        await store.entries()
        before, began = store.commands, time.monotonic()
        await asyncio.sleep(2)
        rate = (store.commands - before) / (time.monotonic() - began)
        assert rate <= 3
