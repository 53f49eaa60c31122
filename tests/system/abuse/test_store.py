"""The Redis of a fleet under attack: what others may write there, and what it may answer."""

import asyncio
import contextlib
import functools
import itertools
import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.store.interface import LIVE_ENTRIES_MAX
from controller.util.sockets import operators_path
from controller.wire.overrides import override_to_json
from engine_shim.link.plan_follower import Source
from lab.harness.processes import free_port
from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.eventually import eventually
from tests.support.fake_redis import JUNK, FakeRedis
from tests.support.linked_engine import linked_engine
from tests.support.redis_server import RedisServer
from tests.support.service_harness import PATIENCE_SECONDS
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process

TAG = "{speculation:1}"
LIVE, AUDIT = f"{TAG}:live", f"{TAG}:audit"


@dataclass
class Operated:
    """A sidecar with the fleet's Redis as an operator sees it."""

    sidecar: SidecarProcess
    log: Path
    stub: "policy_pb2_grpc.PolicyServiceStub"
    metrics_port: int

    def set_override(self, name: str, ttl_seconds: float = 600.0) -> None:
        override = policy_pb2.Override(
            override_id=name, scope=policy_pb2.Scope(fleet=True), author="ann", reason="an attack",
            rule=policy_pb2.OverrideRule(gamma=1),
        )  # fmt: skip
        request = policy_pb2.SetOverrideRequest(override=override, ttl_seconds=ttl_seconds)
        self.stub.SetOverride(request, timeout=PATIENCE_SECONDS)

    def clear_override(self, name: str) -> None:
        self.stub.ClearOverride(
            policy_pb2.ClearOverrideRequest(override_id=name, author="ann", reason="it is over"),
            timeout=PATIENCE_SECONDS,
        )

    def listed(self) -> policy_pb2.ListOverridesResponse:
        request = policy_pb2.ListOverridesRequest()
        return self.stub.ListOverrides(request, timeout=PATIENCE_SECONDS)

    def in_force(self) -> set[str]:
        return {held.override.override_id for held in self.listed().overrides}

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            return str(answer.read().decode())


@contextlib.contextmanager
def operated(directory: Path, url: str, **environment: str) -> Iterator[Operated]:
    directory.mkdir()
    port = free_port()
    with sidecar_process(
        directory,
        "--metrics-port",
        str(port),
        environment={"CONTROLLER_REDIS_URL": url, **environment},
        log=directory / "log",
    ) as sidecar:
        socket = operators_path(Path(sidecar.address.removeprefix("unix:")))
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            yield Operated(sidecar, directory / "log", stub, port)
    # Whatever was in Redis, nothing failed unexpectedly.
    assert "exception" not in (directory / "log").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def pair(
    server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Operated, Operated]]:
    """Two sidecars of one fleet."""
    directory = tmp_path_factory.mktemp("pair")
    with operated(directory / "a", server.url) as one, operated(directory / "b", server.url) as two:
        yield one, two


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """Redis without any override, before and after."""
    with server.client() as opened:
        opened.flushall()
        yield opened
        opened.flushall()


def put(client: redis.Redis, name: str | bytes, text: str | bytes) -> None:
    """Writes an entry as every client with Redis's password can."""
    key = f"{TAG}:entry:".encode() + (name.encode() if isinstance(name, str) else name)
    client.set(key, text)
    ends: dict[Any, float] = {name: float("inf")}
    client.zadd(LIVE, ends)
    client.publish(f"{TAG}:news", "x")


def counts_two(one: Operated) -> bool:
    """Entries that cannot be in force."""
    return one.listed().store.unusable_count == 2


def clear_all(one: Operated) -> None:
    """Also what the tests before have left in this sidecar's mirror."""
    for name in one.in_force():
        one.clear_override(name)


def test_an_entry_that_is_not_utf_8_stops_no_override_and_no_sidecar(
    pair: tuple[Operated, Operated], client: redis.Redis, server: RedisServer, tmp_path: Path
):
    one, two = pair
    clear_all(one)
    one.set_override("a")
    eventually(lambda: two.in_force() == {"a"}, description="both have it")
    put(client, "bad", b'{"revision":5,"body":"\xff\xfe","created":1,"ended":""}')
    put(client, b"\xff\xfe", b"\xff")
    one.set_override("b")
    one.clear_override("a")
    one.set_override("short", ttl_seconds=0.5)
    eventually(lambda: one.in_force() == two.in_force() == {"b"}, description="both follow")
    # Its operators see it wherever they look, and the store is not called broken.
    for operators in pair:
        eventually(functools.partial(counts_two, operators), description="both are counted")
        store = operators.listed().store
        assert store.ok
        assert [line.partition(":")[0] for line in store.unusable] == [r"\xff\xfe", "bad"]
        assert "speculation_store_unusable_overrides 2.0" in operators.metrics()
        assert 'speculation_store_skipped_entries_total{kind="override"}' in operators.metrics()
    diagnosis = controller("doctor", "--address", one.sidecar.address).stdout
    assert "2 overrides in it are not in force" in diagnosis
    assert "bad" in controller("override", "list", "--address", one.sidecar.address).stderr
    with operated(tmp_path / "new", server.url) as new:
        assert new.in_force() == {"b"}
        new.clear_override("bad")
    eventually(lambda: one.listed().store.unusable_count == 1, description="one was cleared")
    lines = [json.loads(line) for line in one.log.read_text().splitlines()]
    skipped = [line for line in lines if line["event"] == "store_entries_skipped"]
    assert [line["kind"] for line in skipped] == ["override"]


def test_an_override_that_no_sidecar_understands_is_named_and_can_be_cleared(
    pair: tuple[Operated, Operated], client: redis.Redis
):
    one, _ = pair
    clear_all(one)
    for name, body in {
        "newer": '{"overrideId": "newer", "fieldOfTheFuture": 1}',
        "alias": override_to_json(
            Override("other", Scope(ScopeKind.FLEET), Rule(gamma=1), "eve", "x")
        ),
    }.items():
        put(client, name, json.dumps({"revision": 9, "body": body, "created": 1, "ended": ""}))
    client.set(f"{TAG}:revision", 9)
    eventually(lambda: one.listed().store.unusable_count == 2, description="both are named")
    assert one.in_force() == set()
    one.clear_override("newer")
    one.clear_override("alias")
    assert one.listed().store.unusable_count == 0


def test_a_foreign_record_in_the_audit_hides_no_other(
    pair: tuple[Operated, Operated], client: redis.Redis
):
    one, _ = pair
    clear_all(one)
    client.delete(AUDIT)
    one.set_override("recorded-1")
    foreign: dict[Any, Any] = {"a": "b"}
    client.xadd(AUDIT, foreign)
    names = ("action", "subject", "author", "reason", "origin", "before", "after")
    for timestamp, text in (("nan", "x"), ("1", b"\xff")):
        foreign = {"at": timestamp, **dict.fromkeys(names, text)}
        client.xadd(AUDIT, foreign)
    one.set_override("recorded-2")
    actions: list[str] = []
    token = ""
    while True:
        page = one.stub.QueryAudit(
            policy_pb2.QueryAuditRequest(limit=1, page_token=token), timeout=PATIENCE_SECONDS
        )
        actions += [record.override_id for record in page.records]
        if not (token := page.next_page_token):
            break
    # Behind them are those of the tests before.
    assert actions[:2] == ["recorded-2", "recorded-1"]
    assert 'speculation_store_skipped_entries_total{kind="audit"}' in one.metrics()
    log = controller("override", "log", "-o", "name", "--address", one.sidecar.address)
    assert len(log.stdout.splitlines()) >= 2, log.stderr


def test_of_a_flood_of_overrides_as_many_are_in_force_as_may_be(
    client: redis.Redis, server: RedisServer, tmp_path: Path
):
    """The newest."""
    tag = "{flood:1}"
    with operated(tmp_path / "sidecar", server.url, CONTROLLER_REDIS_NAMESPACE="flood") as one:
        one.set_override("first")
        with client.pipeline() as pipe:
            for number in range(1000):
                body = override_to_json(
                    Override(f"f{number}", Scope(ScopeKind.FLEET), Rule(gamma=1), "x", "y")
                )
                text = {"revision": 100 + number, "body": body, "created": 1.0, "ended": ""}
                pipe.set(f"{tag}:entry:f{number}", json.dumps(text))
                pipe.zadd(f"{tag}:live", {f"f{number}": float("inf")})
            pipe.set(f"{tag}:revision", 2000)
            pipe.execute()
        newest = {f"f{number}" for number in range(1000 - LIVE_ENTRIES_MAX, 1000)}
        eventually(lambda: one.in_force() == newest, description="the newest are in force")
        assert one.listed().store.unusable_count == 1001 - LIVE_ENTRIES_MAX
        with pytest.raises(grpc.RpcError) as refused:
            one.set_override("another")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # One that is in force can be cleared, and the next one takes its place.
        one.clear_override("f999")
        eventually(
            lambda: one.in_force() == newest - {"f999"} | {f"f{999 - LIVE_ENTRIES_MAX}"},
            description="the next one",
        )


@contextlib.contextmanager
def in_thread(fake: FakeRedis) -> Iterator[FakeRedis]:
    """A fake Redis on an event loop of its own."""
    begun, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    is_finished = asyncio.Event()

    async def serve() -> None:
        async with fake:
            loops.append(asyncio.get_running_loop())
            begun.set()
            await is_finished.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(is_finished.set)
        thread.join(PATIENCE_SECONDS)


def test_with_a_redis_that_answers_junk_a_sidecar_starts_and_steers(tmp_path: Path):
    """To every command another sort of it."""
    junk = itertools.cycle(JUNK.values())
    with (
        in_thread(FakeRedis(lambda *_: next(junk))) as fake,
        operated(tmp_path / "sidecar", fake.url) as one,
        linked_engine(one.sidecar.address, "honest") as engine,
    ):
        for attempt in range(5):
            with pytest.raises(grpc.RpcError) as refused:
                one.set_override(f"o{attempt}")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert one.in_force() == set()

        def steered() -> bool:
            engine.run(5)
            return engine.link.plan_follower.source is Source.PLAN

        eventually(steered, description="the engine is steered")
        assert not one.listed().store.ok
        assert len(fake.commands) > len(JUNK)
