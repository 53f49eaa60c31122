"""Sidecars that share a Redis: one operator, every engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from controller.service.profile_library import identity_of
from speculation.v1 import policy_pb2, service_pb2
from tests.controller.service.harness import (
    Running,
    SteerClient,
    failure,
    make_profile,
    serving,
    soon,
    until,
)
from tests.controller.service.test_overrides import FLEET, asked, clear, gammas, listed, set_
from tests.controller.store.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@asynccontextmanager
async def fleet(folder: Path, server: RedisServer, count: int = 2) -> AsyncIterator[list[Running]]:
    async with AsyncExitStack() as stack:
        sidecars = []
        for number in range(count):
            own = folder / f"pod-{number}"
            own.mkdir(exist_ok=True)
            sidecars.append(await stack.enter_async_context(serving(own, redis_url=server.url)))
        yield sidecars


async def test_an_override_reaches_every_sidecar_within_a_second(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 3) as sidecars:
        streams = []
        for number, running in enumerate(sidecars):
            stream = SteerClient(running, await running.introduce(f"engine-{number}"))
            await stream.send()
            await stream.plan()
            streams.append(stream)
        began = time.monotonic()
        await set_(sidecars[0], scope=FLEET, gamma=1)
        plans = await asyncio.gather(*(stream.plan() for stream in streams))
        assert time.monotonic() - began < 1
        assert all(set(gammas(plan).values()) == {1} for plan in plans)
        # Another operator, at another sidecar, takes it back.
        began = time.monotonic()
        await clear(sidecars[2])
        plans = await asyncio.gather(*(stream.plan() for stream in streams))
        assert time.monotonic() - began < 1
        assert not any(plan.overrides for plan in plans)
        query = policy_pb2.QueryAuditRequest()
        records = (await soon(sidecars[1].policy.QueryAudit(query))).records
        assert [(r.action, r.author) for r in records] == [("clear", "bob"), ("set", "ann")]


async def test_without_redis_engines_are_steered_on_under_what_was_in_force(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        await one.introduce()
        await set_(one, scope=FLEET, gamma=1)
        await until(lambda: bool(two.sidecar.book.active()))
        server.kill()
        await two.introduce("late")
        assert set(gammas((await two.status("late")).plan).values()) == {1}
        code, text = await failure(one.policy.SetOverride(asked("o2", off=True)))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "redis" in text
        assert set(await listed(one)) == {"o1"}
        await until(lambda: not two.sidecar.book.health.ok)
        assert "going on with what is held here" in (await one.explain()).store.detail
        server.start()
        await until(lambda: one.sidecar.book.health.ok and two.sidecar.book.health.ok)
        # It came back empty, and has everything again.
        async with serving(tmp_path, redis_url=server.url) as new:
            await until(lambda: bool(new.sidecar.book.active()))


async def test_an_override_ends_everywhere_though_redis_is_gone(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        await set_(one, scope=FLEET, off=True, request={"ttl_seconds": 1.0})
        await until(lambda: bool(two.sidecar.book.active()))
        server.kill()
        await until(lambda: not (one.sidecar.book.active() or two.sidecar.book.active()))


async def test_of_two_operators_at_two_sidecars_only_one_replaces(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        etag = (await set_(one, scope=FLEET, gamma=1)).held.etag
        results = await asyncio.gather(
            set_(one, scope=FLEET, gamma=2, request={"etag": etag}),
            set_(two, scope=FLEET, gamma=3, request={"etag": etag}),
            return_exceptions=True,
        )
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert [r.code() for r in refused] == [grpc.StatusCode.ABORTED]


async def test_what_one_pod_has_measured_the_next_one_finds_when_it_boots(
    tmp_path: Path, server: RedisServer
):
    profile = make_profile()
    install = service_pb2.InstallProfileRequest(profile_json=profile.to_json())
    async with fleet(tmp_path, server, 1) as (one,):
        await one.introduce()
        await soon(one.profiling.InstallProfile(install))
    later = tmp_path / "later"
    later.mkdir()
    async with serving(later, redis_url=server.url) as two:
        await two.introduce("booted")
        await two.introduce("of-another-model", target_model="another")
        async with asyncio.timeout(10):
            while (await two.status("booted")).profile_id != profile.profile_id:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not (await two.status("of-another-model")).profile_id
        # Found once, it is here: the next engine has it from its first plan on.
        server.kill()
        await two.introduce("third")
        assert (await two.status("third")).profile_id == profile.profile_id


async def test_a_profile_under_a_wrong_name_is_refused(tmp_path: Path, server: RedisServer):
    async with fleet(tmp_path, server, 1) as (one,):
        await one.introduce()
        wrong = make_profile("another").to_json()
        identity = identity_of(one.sidecar.registry.by_engine("engine-0").spec)
        with server.client() as client:
            client.hset("{speculation:1}:profiles", identity, wrong)
        await one.introduce()
        await asyncio.sleep(0.3)
        assert not (await one.status()).profile_id
        with server.client() as client:
            client.hset("{speculation:1}:profiles", identity, "no profile")
        await one.introduce()
        await asyncio.sleep(0.3)
        assert not (await one.status()).profile_id


async def test_a_profile_that_cannot_be_shared_is_used_all_the_same(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        await one.introduce()
        server.kill()
        install = service_pb2.InstallProfileRequest(profile_json=make_profile().to_json())
        await soon(one.profiling.InstallProfile(install))
        assert (await one.status()).profile_id == make_profile().profile_id
