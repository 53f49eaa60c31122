"""What every store promises, held against each of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from controller.store.file_store import FileStore
from controller.store.interface import Actor, BlobKind, ConflictError, Entry, Store
from controller.store.redis_store import RedisStore
from tests.support.redis_server import RedisServer

ANN = Actor("ann", "the drafter is ill", "uid 1000")
BOB = Actor("bob", "it is well again", "uid 1001")

Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[Store]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["file", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> Opened:
    """Opens the store again each time, upon the same content."""
    if request.param == "redis":
        with server.client() as client:
            client.flushall()

    @asynccontextmanager
    async def make() -> AsyncIterator[Store]:
        store: Store = (
            FileStore(tmp_path / "state")
            if request.param == "file"
            else RedisStore(server.url, tmp_path / "mirror")
        )
        await store.open(lambda: None)
        try:
            yield store
        finally:
            await store.close()

    return make


async def by_id(store: Store) -> dict[str, Entry]:
    return {entry.override_id: entry for entry in await store.entries()}


async def test_a_record_of_something_else_is_in_the_audit_and_changes_no_entry(opened: Opened):
    async with opened() as store:
        await store.write("o1", "{}", None, 0, ANN)
        await store.record("measure", "engine-0", BOB)
        await store.record("measure", "o1", BOB)
        assert set(await by_id(store)) == {"o1"}
    async with opened() as store:
        entry = (await by_id(store))["o1"]
        assert (entry.body, entry.ended) == ("{}", "")
        newest, before, oldest = await store.audit(10)
        assert (newest.action, newest.subject, newest.author) == ("measure", "o1", "bob")
        assert (before.subject, before.reason, before.origin) == (
            "engine-0",
            BOB.reason,
            BOB.origin,
        )
        assert oldest.action == "set"
        assert [r.action for r in await store.audit(10, subject="engine-0")] == ["measure"]
        await store.write("o2", "{}", None, 0, ANN)


async def wait_for_condition(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110  # what is asked is not in this process
            await asyncio.sleep(0.02)


async def test_what_was_written_is_there_also_after_a_restart(opened: Opened):
    async with opened() as store:
        assert await store.entries() == []
        entry = await store.write("a", '{"x":1}', 100.0, 0, ANN)
        assert (entry.override_id, entry.body, entry.ended) == ("a", '{"x":1}', "")
        assert entry.remaining_seconds == pytest.approx(100, abs=30)
        await store.write("b", "{}", None, 0, ANN)
    async with opened() as store:
        entry_by_id = await by_id(store)
        assert set(entry_by_id) == {"a", "b"}
        assert entry_by_id["a"].etag == entry.etag
        assert entry_by_id["a"].remaining_seconds == pytest.approx(100, abs=30)
        assert entry_by_id["b"].remaining_seconds is None


async def test_nobody_overwrites_what_he_has_not_seen(opened: Opened):
    async with opened() as store:
        first = await store.write("a", "1", 100.0, 0, ANN)
        with pytest.raises(ConflictError) as taken:
            await store.write("a", "2", 100.0, 0, BOB)
        assert taken.value.stored_entry is not None
        assert taken.value.stored_entry.etag == first.etag
        second = await store.write("a", "2", 100.0, first.revision, BOB)
        assert second.revision > first.revision
        with pytest.raises(ConflictError):
            await store.write("a", "3", 100.0, first.revision, ANN)
        with pytest.raises(ConflictError):
            await store.clear("a", first.revision, ANN)
        with pytest.raises(ConflictError) as absent:
            await store.clear("nobody", 7, ANN)
        assert absent.value.stored_entry is None
        assert (await by_id(store))["a"].body == "2"


async def test_a_cleared_id_is_not_taken_again(opened: Opened):
    async with opened() as store:
        entry = await store.write("a", "1", None, 0, ANN)
        tombstone = await store.clear("a", entry.revision, BOB)
        assert (tombstone.ended, tombstone.body) == ("cleared", "")
    async with opened() as store:
        cleared_entry = (await by_id(store))["a"]
        assert cleared_entry.ended == "cleared"
        with pytest.raises(ConflictError) as ended:
            await store.write("a", "1", None, 0, ANN)
        assert ended.value.stored_entry is not None
        assert ended.value.stored_entry.ended == "cleared"


async def test_what_has_run_out_is_ended_and_recorded_once(opened: Opened):
    async with opened() as store:
        # As it was when it was written; a slow machine's next look may find it over.
        assert (await store.write("short", "1", 0.15, 0, ANN)).ended == ""
        await store.write("long", "2", 100.0, 0, ANN)

        async def has_expired() -> bool:
            return (await by_id(store))["short"].ended == "expired"

        await wait_for_condition(has_expired)
        await store.entries()
        assert (await by_id(store))["long"].ended == ""
        records = [r for r in await store.audit(10) if r.action == "expire"]
        assert [(r.subject, r.before, r.after) for r in records] == [("short", "1", "")]
        with pytest.raises(ConflictError):
            await store.write("short", "1", 5.0, 0, ANN)


async def test_every_change_is_recorded(opened: Opened):
    async with opened() as store:
        entry = await store.write("a", "1", 100.0, 0, ANN)
        entry = await store.write("a", "2", 100.0, entry.revision, BOB)
        await store.write("b", "3", 100.0, 0, BOB)
        await store.clear("a", entry.revision, ANN)
    async with opened() as store:
        records = await store.audit(10)
        assert [(r.action, r.subject, r.author, r.before, r.after) for r in records] == [
            ("clear", "a", "ann", "2", ""),
            ("set", "b", "bob", "", "3"),
            ("replace", "a", "bob", "1", "2"),
            ("set", "a", "ann", "", "1"),
        ]
        assert records[0].reason == "the drafter is ill"
        assert records[0].origin == "uid 1000"
        assert records == sorted(records, key=lambda r: -r.at)
        assert [r.subject for r in await store.audit(10, subject="a")] == ["a", "a", "a"]
        assert await store.audit(2) == records[:2]
        assert await store.audit(10, before=records[1].sequence) == records[2:]


async def test_of_many_at_once_one_wins(opened: Opened):
    async with opened() as store:
        results = await asyncio.gather(
            *(store.write("a", str(i), 100.0, 0, ANN) for i in range(20)), return_exceptions=True
        )
        won = [r for r in results if isinstance(r, Entry)]
        assert len(won) == 1
        assert all(isinstance(r, ConflictError) for r in results if r is not won[0])
        assert (await by_id(store))["a"].body == won[0].body


async def test_revisions_only_grow(opened: Opened):
    seen: list[int] = []
    for number in range(3):
        async with opened() as store:
            for name in "ab":
                entry = await store.write(f"{name}{number}", "x", 100.0, 0, ANN)
                seen.append(entry.revision)
    assert seen == sorted(set(seen))


async def test_text_of_any_kind_comes_back_as_it_was(opened: Opened):
    body = '{"reason":"Überlast — \\u0000 «γ» 夜 \\" \\n"}'
    who = Actor("änn", "günstiger – 夜", "unix")
    async with opened() as store:
        await store.write("a", body, 100.0, 0, who)
    async with opened() as store:
        assert (await by_id(store))["a"].body == body
        assert (await store.audit(1))[0].reason == who.reason


async def test_it_says_how_it_is(opened: Opened):
    async with opened() as store:
        await store.entries()
        assert store.health.ok
        assert store.health.detail


GOODS = BlobKind("goods", sources=3, seconds=None)
BRIEF = BlobKind("brief", sources=3, seconds=2.0)


async def test_a_shelf_keeps_one_text_of_a_source_the_newest_first(opened: Opened):
    async with opened() as store:
        assert await store.blobs.items(GOODS, "aa") == []
        assert await store.blobs.names(GOODS) == []
        for source in ("01", "02", "01"):
            await store.blobs.put(GOODS, "aa", source, f"{source} says: é\n{{}}")
            await asyncio.sleep(0.02)
        await store.blobs.put(GOODS, "bb", "03", "other")
    async with opened() as store:
        items = await store.blobs.items(GOODS, "aa")
        assert [(item.source, item.text) for item in items] == [
            ("01", "01 says: é\n{}"),
            ("02", "02 says: é\n{}"),
        ]
        assert 0 <= items[0].age_seconds < items[1].age_seconds < 30
        assert await store.blobs.names(GOODS) == ["bb", "aa"]
        assert await store.blobs.items(BRIEF, "aa") == []


async def test_a_shelf_keeps_the_newest_sources_and_names(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    for module in ("file_store", "redis_blobs"):
        monkeypatch.setattr(f"controller.store.{module}.BLOB_NAMES_MAX", 2)
    async with opened() as store:
        for source in ("01", "02", "03", "04", "05"):
            await store.blobs.put(GOODS, "aa", source, "x")
            await asyncio.sleep(0.02)
        assert [i.source for i in await store.blobs.items(GOODS, "aa")] == ["05", "04", "03"]
        await store.blobs.put(GOODS, "bb", "01", "x")
        await asyncio.sleep(0.02)
        await store.blobs.put(GOODS, "cc", "01", "x")
        assert await store.blobs.names(GOODS) == ["cc", "bb"]
        assert await store.blobs.items(GOODS, "aa") == []


async def test_what_is_too_old_is_not_on_the_shelf(opened: Opened):
    async with opened() as store:
        await store.blobs.put(BRIEF, "aa", "01", "x")
        assert len(await store.blobs.items(BRIEF, "aa")) == 1

        async def gone() -> bool:
            return await store.blobs.items(BRIEF, "aa") == []

        await wait_for_condition(gone)
