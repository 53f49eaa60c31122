"""Sentinel and Cluster: real ones, as small as they come."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import redis

from controller.store.interface import Actor, ConflictError, Entry, StoreUnavailableError
from controller.store.redis_client import RedisUrlError, close, connect
from controller.store.redis_errors import REDIS_ERRORS
from controller.store.redis_store import RedisStore
from controller.store.redis_url import RedisAccess
from lab.harness.processes import free_port
from tests.support.fake_redis import FakeRedis, handshake, resp
from tests.support.redis_server import PATIENCE_SECONDS, RedisServer
from tests.support.store_tasks import run_store_tasks

ANN = Actor("ann", "because", "uid 1000")


@contextlib.contextmanager
def cluster_node(folder: Path) -> Iterator[RedisServer]:
    """A node of a cluster, without any slot."""
    port = free_port()
    while port > 55_000:  # its bus has a port 10,000 above
        port = free_port()
    options = {
        "--cluster-enabled": "yes",
        "--cluster-config-file": "nodes.conf",
        # A node learns of a replica once that has had a ping, after ten seconds by default.
        "--repl-ping-replica-period": "1",
        "--repl-diskless-sync-delay": "0",
    }
    with RedisServer(folder, *chain.from_iterable(options.items()), port=port) as node:
        yield node


def wait_for(client: redis.Redis, pattern: str, *command: str) -> None:
    """Until the answer to a command has this in it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not re.search(pattern, str(client.execute_command(*command))):
        assert time.monotonic() < end, pattern
        time.sleep(0.02)


@pytest.fixture(scope="module")
def lasting_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with cluster_node(tmp_path_factory.mktemp("cluster") / "node") as node:
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_for(client, r"cluster_state\W+ok", "CLUSTER", "INFO")
        yield node


@pytest.fixture
def cluster(lasting_cluster: RedisServer) -> RedisServer:
    """One node that holds every slot, and no key."""
    with lasting_cluster.client() as client:
        client.flushall()
    return lasting_cluster


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """(a node that holds every slot, its replica)."""
    with (
        cluster_node(tmp_path / "primary") as primary,
        cluster_node(tmp_path / "replica") as replica,
    ):
        with primary.client() as one, replica.client() as two:
            one.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            two.execute_command("CLUSTER", "MEET", "127.0.0.1", primary.port)
            wait_for(two, "0-16383", "CLUSTER", "NODES")
            two.execute_command("CLUSTER", "REPLICATE", one.execute_command("CLUSTER", "MYID"))
            wait_for(two, "connected", "ROLE")
            wait_for(one, str(replica.port), "CLUSTER", "SLOTS")
            wait_for(one, r"cluster_state\W+ok", "CLUSTER", "INFO")
        yield primary, replica


async def live(store: RedisStore) -> dict[str, Entry]:
    return {e.override_id: e for e in await store.entries() if not e.ended}


async def written(store: RedisStore, name: str) -> Entry:
    """Tries as an operator does who reads that the store is away."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await store.write(name, "1", 100.0, 0, ANN)
            except StoreUnavailableError:
                await asyncio.sleep(0.2)


async def keeps_summaries(one: RedisStore, two: RedisStore) -> None:
    # Others may write what is no UTF-8.
    await one.summaries.put("ab", b"\xff")
    summaries = await two.summaries.read()
    assert [(item.source, item.body) for item in summaries.summaries] == [("ab", b"\xff")]
    await two.summaries.remove("ab")
    assert not (await one.summaries.read()).summaries


async def test_a_cluster_keeps_its_promises(cluster: RedisServer):
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    one, two = RedisStore(url, reconcile_seconds=0.2), RedisStore(url, reconcile_seconds=0.2)
    news = asyncio.Event()
    await one.open(lambda: None)
    await two.open(news.set)
    async with run_store_tasks(one), run_store_tasks(two):
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


async def refusal(store: RedisStore, name: str) -> str:
    """Sets an override; why it is not acknowledged, "" if it is."""
    current_entry: Entry | None
    try:
        current_entry = await store.write(name, f"body of {name}", None, 0, ANN)
    except ConflictError as conflict:
        # An earlier attempt was carried out, though its answer was lost.
        current_entry = conflict.stored_entry
    except StoreUnavailableError as error:
        return str(error)
    assert current_entry is not None
    assert current_entry.body == f"body of {name}"
    return ""


async def acknowledged(store: RedisStore, names: Iterable[str]) -> None:
    """Sets every one as an operator does: with the same id until it is acknowledged."""
    for name in names:
        async with asyncio.timeout(120):
            while words := await refusal(store, name):
                assert words.endswith(("nothing was changed", "retry with the same id"))
                await asyncio.sleep(0.05)


async def require_each_once(store: RedisStore, names: Collection[str]) -> None:
    """All are in force, and none was set twice."""
    assert set(await live(store)) == set(names)
    set_subjects = [record.subject for record in await store.audit(1000) if record.action == "set"]
    assert len(set_subjects) == len(set(set_subjects))


async def set_during(one: RedisStore, two: RedisStore, fail_over: Callable[[], None]) -> None:
    """Two sidecars set overrides before, during and after a fail-over."""
    names = [f"o{number}" for number in range(60)]
    await acknowledged(one, names[:10])
    # What the other one has not seen yet is only where the first one knows of it.
    setting = [
        asyncio.create_task(acknowledged(store, mine))
        for store, mine in ((one, names[10:35]), (two, names[35:]))
    ]
    await asyncio.sleep(0)
    await asyncio.to_thread(fail_over)
    await asyncio.gather(*setting)
    async with asyncio.timeout(120):
        for store in (one, two):
            while set(await live(store)) != set(names) or not store.health.ok:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    for store in (one, two):
        await require_each_once(store, names)


async def test_a_fail_over_of_sentinel_during_sets_loses_and_doubles_nothing(
    watched: tuple[RedisServer, RedisServer, RedisServer],
):
    primary, _, sentinel = watched
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet/0"
    one = RedisStore(url, timeout_seconds=0.5, reconcile_seconds=0.1)
    two = RedisStore(url, timeout_seconds=0.5, reconcile_seconds=0.1)
    await one.open(lambda: None)
    await two.open(lambda: None)
    async with run_store_tasks(one), run_store_tasks(two):
        await keeps_summaries(one, two)
        await set_during(one, two, primary.kill)
    await one.close()
    await two.close()


async def test_a_fail_over_of_a_cluster_during_sets_loses_and_doubles_nothing(
    replicated: tuple[RedisServer, RedisServer],
):
    primary, replica = replicated

    def fail_over() -> None:
        primary.kill()
        with replica.client() as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

    url = f"redis+cluster://127.0.0.1:{primary.port}"
    one = RedisStore(url, timeout_seconds=0.5, reconcile_seconds=0.1)
    two = RedisStore(url, timeout_seconds=0.5, reconcile_seconds=0.1)
    await one.open(lambda: None)
    await two.open(lambda: None)
    async with run_store_tasks(one), run_store_tasks(two):
        await set_during(one, two, fail_over)
    await one.close()
    await two.close()


_NOTHING_CHANGED = (
    "CLUSTERDOWN The cluster is down", "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down", "MISCONF Errors writing to the AOF file",
    "NOREPLICAS Not enough good replicas to write", "OOM command not allowed",
    "READONLY You can't write against a read only replica", "TRYAGAIN Multiple keys request",
)  # fmt: skip
_UNKNOWN_OUTCOME = ("MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1", "UNKILLABLE Sorry", "ERR what")


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_an_error_in_place_of_a_write_is_typed_and_its_outcome_is_told(
    cluster: RedisServer, scheme: str
):
    error = ""

    def reply(name: str, words: Sequence[bytes]) -> bytes | None:
        if name == "CLUSTER":
            return resp([[0, 16383, [b"127.0.0.1", fake.port, b"0" * 40]]])
        return f"-{error}\r\n".encode() if name == "EVAL" and b"refused" in words else None

    async with FakeRedis(reply, cluster.port) as fake:
        store = RedisStore(f"{scheme}://127.0.0.1:{fake.port}", reconcile_seconds=60)
        await store.open(lambda: None)
        try:
            await written(store, "before")
            for error in (*_NOTHING_CHANGED, *_UNKNOWN_OUTCOME):
                with pytest.raises(StoreUnavailableError) as refused:
                    await store.write("refused", "1", None, 0, ANN)
                if error in _NOTHING_CHANGED:
                    assert str(refused.value).endswith("; nothing was changed"), error
                assert set(await live(store)) == {"before"}, error
            await written(store, "after")
            assert set(await live(store)) == {"before", "after"}
            assert store.health.ok
        finally:
            await store.close()


async def test_a_write_that_moved_to_another_node_is_done_there_once(cluster: RedisServer):
    moved = 0

    def reply(name: str, words: Sequence[bytes]) -> bytes | None:
        nonlocal moved
        if name == "CLUSTER":
            return resp([[0, 16383, [b"127.0.0.1", fake.port, b"0" * 40]]])
        if name == "EVAL" and b"o1" in words:
            moved += 1
            return f"-MOVED {slot} 127.0.0.1:{cluster.port}\r\n".encode()
        return None

    with cluster.client() as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", "{speculation:1}")
    async with FakeRedis(reply, cluster.port) as fake:
        store = RedisStore(f"redis+cluster://127.0.0.1:{fake.port}", reconcile_seconds=60)
        await store.open(lambda: None)
        try:
            await store.write("o1", "1", None, 0, ANN)
            assert moved == 1
            await require_each_once(store, ["o1"])
        finally:
            await store.close()


async def test_a_write_whose_answer_is_lost_is_not_sent_again(cluster: RedisServer):
    sent = 0

    def reply(name: str, words: Sequence[bytes]) -> bytes | None:
        nonlocal sent
        if name == "CLUSTER":
            return resp([[0, 16383, [b"127.0.0.1", fake.port, b"0" * 40]]])
        sent += name == "EVAL" and b"o1" in words
        # Half an answer, as where a node dies.
        return b"*3\r\n:1\r\n" if name == "EVAL" and b"o1" in words else None

    for scheme in ("redis", "redis+cluster"):
        sent = 0
        async with FakeRedis(reply, cluster.port) as fake:
            url = f"{scheme}://127.0.0.1:{fake.port}"
            store = RedisStore(url, timeout_seconds=0.2, reconcile_seconds=60)
            await store.open(lambda: None)
            try:
                with pytest.raises(StoreUnavailableError, match="it is unknown"):
                    await store.write("o1", "1", None, 0, ANN)
                assert sent == 1
            finally:
                await store.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://x", "unknown scheme"),
        ("redis+other://x", "unknown scheme"),
        ("redis://", "no host"),
        ("redis+sentinel://host:1", "must name the service"),
        ("redis://:secret@host:port/0", "Port"),
        ("redis://:secret@host/0?pasword=secret", r"client does not know \(pasword\)"),
        # What may be a part of a password is not named.
        ("redis://:a?secret=b@host", "the Redis client does not know; the options are"),
        ("redis://host?password=a&secret=b", "the Redis client does not know; the options are"),
        (
            "redis+sentinel://h/s?sentinel_password=a&secret=b",
            "client does not know; the options are",
        ),
        ("redis://host?Secret_1=a", "the Redis client does not know; the options are"),
        ("redis+sentinel://host/s?no_such=secret", "an option that the Redis client does not know"),
        ("redis+cluster://host?no_such=", "an option that the Redis client does not know"),
        ("redis://host?protocol=3", "an option that the Redis client does not know"),
        (
            "rediss://host?ssl_no_such=secret",
            r"a connection of this kind does not support \(ssl_no_such\)",
        ),
        ("unix:///s?socket_keepalive=1", r"of this kind does not support \(socket_keepalive\)"),
        ("rediss://host?ssl_cert_reqs=maybe", "none, optional, required"),
        ("rediss://host?ssl_cert_reqs=NONE", "none, optional, required"),
        ("rediss://host?ssl_check_hostname=maybe", "ssl_check_hostname in its query must be yes"),
        ("rediss://host?ssl_check_hostname=off", "ssl_check_hostname in its query must be yes"),
        ("redis://host?socket_keepalive=2", "socket_keepalive in its query must be yes or no"),
        ("redis+sentinel://host/s?sentinel_tls=on", "sentinel_tls in its query must be yes"),
        ("redis://host?sentinel_tls=yes", "an option that the Redis client does not know"),
        ("rediss://host?ssl_min_version=5", "TLS/SSL version"),
        ("rediss://host?ssl_min_version=TLSv1_3", "ssl_min_version"),
        ("rediss://host?ssl_ciphers=secret", "No cipher can be selected"),
        ("rediss://host?ssl_ca_data=secret", "does not contain a certificate"),
        ("rediss://host?ssl_include_verify_flags=secret", "ssl_include_verify_flags"),
        ("rediss+sentinel://host/s?sentinel_tls=no&ssl_ciphers=secret", "No cipher"),
        ("redis+sentinel://host/s?sentinel_tls=yes&ssl_ciphers=secret", "No cipher"),
        ("redis+sentinel://host/s?ssl_ca_certs=/a", "sentinel_tls=yes"),
        ("redis://host?db=", "db in its query has no value"),
        ("redis://host?password=", "password in its query has no value"),
        ("rediss://host?ssl_check_hostname", "ssl_check_hostname in its query has no value"),
        ("redis://host?db=-1", "at least 0"),
        ("redis://host?health_check_interval=-1", "at least 0"),
        ("redis://host?max_connections=1", "at least 2"),
        ("redis://host?client_name=a%20b", "without blanks"),
        (" ", "redis_url: it is empty|it is empty"),
        ("", "redis_url: it is empty"),
        ("redis://host?db=1&db=2", "an option twice"),
        ("redis://host/1?db=2", "different databases"),
        ("redis://host/x", "must be a number"),
        ("redis+sentinel://host/s/x", "must be a number"),
        ("redis+cluster://host/1", "only database 0"),
        ("redis://host?socket_timeout=x", "Invalid value for .socket_timeout"),
        ("redis://host?socket_timeout=0", "above 0"),
        ("redis://:sec#ret@host", "%23"),
        ("redis://:sec/ret@host", "Port|percent-encoded"),
        ("redis://::1", "in brackets"),
        ("redis+sentinel://::1:27912/mymaster", "in brackets"),
        ("redis+cluster://a,::ffff:10.0.0.1:6379", "in brackets"),
        ("redis://::sec/ret@host", "percent-encoded"),
        ("redis://:6379", "no host"),
        ("redis://fe80::1:6379", "in brackets"),
        ("redis+sentinel://a:1,,b:2/s", "no host"),
        ("redis+sentinel://[::1]x/s", "in brackets"),
        ("unix://s", "absolute path"),
        ("unix:///", "absolute path"),
        ("redis://a:1,b:2", "Port"),
        ("redis+sentinel://a, b/s", "contains a blank"),
        ("redis://a b:6379", "contains a blank"),
        ("redis://host:0", "port 0"),
        ("redis+cluster://a,b:", "no port"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str, text: str):
    with pytest.raises(RedisUrlError, match=text) as error:
        connect(url, 1.0)
    assert "secret" not in str(error.value)


CONTRADICTING: tuple[tuple[str, RedisAccess, str], ...] = (
    ("redis://:secret@h", RedisAccess(password="hunter2"), "redis_password give different values"),
    (
        "redis://:secret@h",
        RedisAccess(password_file=Path("/p")),
        "redis_password_file give different values",
    ),
    ("redis://h?password=secret", RedisAccess(password="hunter2"), "in its query and redis_pass"),
    ("redis://:secret@h?password=hunter2", RedisAccess(), "the URL and password in its query"),
    ("redis://ann@h", RedisAccess(user="bob"), "the URL and redis_user give different"),
    ("redis://h", RedisAccess(user="bob", user_file=Path("/u")), "redis_user and redis_user_file"),
    (
        "redis+sentinel://h/s?sentinel_password=secret",
        RedisAccess(sentinel_password_file=Path("/p")),
        "values of sentinel password",
    ),
    ("rediss://h?ssl_ca_certs=/a", RedisAccess(ca=Path("/b")), "values of ca"),
    ("redis://h", RedisAccess(ca=Path("/a")), "need a scheme with TLS"),
    ("redis+cluster://h?ssl_ca_certs=/a", RedisAccess(), "need a scheme with TLS"),
    ("unix:///s", RedisAccess(client_certificate=Path("/a")), "need a scheme with TLS"),
    ("rediss://h", RedisAccess(client_key=Path("/a")), "needs redis_client_certificate"),
    ("redis://h", RedisAccess(sentinel_password="secret"), "needs the scheme redis.sentinel"),
    ("redis+cluster://h", RedisAccess(sentinel_user="ann"), "needs the scheme redis.sentinel"),
)


@pytest.mark.parametrize(("url", "access", "text"), CONTRADICTING)
def test_settings_that_contradict_each_other_are_refused(url: str, access: RedisAccess, text: str):
    with pytest.raises(RedisUrlError, match=text) as error:
        connect(url, 1.0, access=access)
    assert "secret" not in str(error.value)
    assert "hunter2" not in str(error.value)


def test_what_two_sources_agree_on_is_taken():
    connect("redis://ann:x@h?username=ann", 1.0, access=RedisAccess(user="ann", password="x"))
    connect("rediss://h?ssl_ca_certs=/a", 1.0, access=RedisAccess(ca=Path("/a")))


async def test_a_sentinel_that_does_not_answer_is_asked_last_the_next_time():
    state = {
        b"name": b"s", b"ip": b"::1", b"port": b"1", b"flags": b"master",
        b"num-other-sentinels": b"0",
    }  # fmt: skip
    flat = [part for pair in state.items() for part in pair]

    def silent(name: str, _: object) -> bytes | None:
        return handshake(name) or b""

    def good(name: str, _: object) -> bytes | None:
        return handshake(name) or resp([flat])

    def endless(name: str, _: object) -> bytes | None:
        return handshake(name) or b"$9999999999\r\n"

    async with FakeRedis(silent) as one, FakeRedis(endless) as two, FakeRedis(good) as three:
        hosts = ",".join(f"127.0.0.1:{fake.port}" for fake in (one, two, three))
        client = connect(f"redis+sentinel://{hosts}/s", 30.0)
        manager = client.connection_pool.sentinel_manager
        waiting = asyncio.create_task(manager.discover_master("s"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not one.commands.count("SENTINEL"):  # noqa: ASYNC110  # it is the other end's
                await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The second one's reply is refused before it is read.
        assert await manager.discover_master("s") == ("::1", 1)
        assert [fake.commands.count("SENTINEL") for fake in (one, two, three)] == [1, 1, 1]
        await close(client)


async def test_a_cluster_that_has_moved_is_found_again_by_the_url(cluster: RedisServer):
    listed = 0

    def slots(name: str, _: object) -> bytes | None:
        if name == "CLUSTER":
            return resp([[0, 16383, [b"127.0.0.1", listed, b"0" * 40]]])
        return None

    async with FakeRedis(slots, cluster.port) as seed:
        client = connect(f"redis+cluster://127.0.0.1:{seed.port}", 30.0)
        async with FakeRedis(slots, cluster.port) as before:
            listed = before.port
            assert await client.ping(target_nodes="primaries")
        # Every node that the cluster has listed is gone; others have taken their place.
        listed = cluster.port
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(*REDIS_ERRORS, OSError):
                    if await client.set("x", "1"):
                        break
        assert [node.port for node in client.get_nodes()] == [cluster.port]
        await close(client)
