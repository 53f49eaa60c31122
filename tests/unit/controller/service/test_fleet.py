"""Sidecars that share a Redis: one operator, every engine."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from controller.core.clock import VirtualClock
from controller.core.cost.profile import Profile
from controller.service.state.profile_registry import identity_of
from controller.store.interface import PROFILES
from lab.harness.processes import free_port
from speculation.v1 import policy_pb2, service_pb2, service_pb2_grpc
from tests.support.credentials import token_line
from tests.support.override_calls import (
    FLEET,
    clear_override,
    gammas,
    list_overrides,
    make_override_request,
    plan_under,
    set_override,
)
from tests.support.redis_server import RedisServer
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    health_stub,
    make_profile,
    read_next,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@asynccontextmanager
async def fleet(
    folder: Path, server: RedisServer, count: int = 2
) -> AsyncIterator[list[RunningSidecar]]:
    async with AsyncExitStack() as stack:
        sidecars = []
        for number in range(count):
            own = folder / f"pod-{number}"
            own.mkdir(exist_ok=True)
            sidecars.append(
                await stack.enter_async_context(running_sidecar(own, redis_url=server.url))
            )
        yield sidecars


async def test_an_override_reaches_every_sidecar(tmp_path: Path, server: RedisServer):
    async with fleet(tmp_path, server, 3) as sidecars:
        streams = []
        for number, running in enumerate(sidecars):
            stream = SteerClient(running, await running.introduce(f"engine-{number}"))
            await stream.send()
            await stream.plan()
            streams.append(stream)
        await set_override(sidecars[0], scope=FLEET, gamma=1)
        plans = await with_timeout(
            asyncio.gather(*(plan_under(stream, "o1") for stream in streams))
        )
        assert all(set(gammas(plan).values()) == {1} for plan in plans)
        # Another operator, at another sidecar, takes it back.
        await clear_override(sidecars[2])
        await with_timeout(asyncio.gather(*(plan_under(stream) for stream in streams)))
        query = policy_pb2.QueryAuditRequest()
        records = (await with_timeout(sidecars[1].policy.QueryAudit(query))).records
        assert [(r.action, r.author) for r in records] == [("clear", "bob"), ("set", "ann")]


async def test_without_redis_engines_are_steered_on_under_what_was_in_force(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        await one.introduce()
        await set_override(one, scope=FLEET, gamma=1)
        await wait_until(lambda: bool(two.sidecar.override_registry.active()))
        server.kill()
        await two.introduce("late")
        assert set(gammas((await two.status("late")).plan).values()) == {1}
        code, text = await failure(one.policy.SetOverride(make_override_request("o2", off=True)))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "redis" in text
        assert set(await list_overrides(one)) == {"o1"}
        await wait_until(lambda: not two.sidecar.override_registry.health.ok)
        assert (
            "the local copy of the overrides stays in force" in (await one.explain()).store.detail
        )
        server.start()
        await wait_until(
            lambda: (
                one.sidecar.override_registry.health.ok and two.sidecar.override_registry.health.ok
            )
        )
        # It came back empty, and has everything again.
        async with running_sidecar(tmp_path, redis_url=server.url) as new:
            await wait_until(lambda: bool(new.sidecar.override_registry.active()))


async def test_a_store_in_trouble_is_a_health_status_of_its_own(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        stub = health_stub(one.channel)
        serving_, away = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        watch: Any = stub.Watch(health_pb2.HealthCheckRequest(service="speculation.store"))

        async def becomes(status: int) -> None:
            while (await read_next(watch)).status != status:
                pass

        await with_timeout(becomes(serving_))
        server.kill()
        await with_timeout(becomes(away))
        whole = await with_timeout(stub.Check(health_pb2.HealthCheckRequest()))
        assert whole.status == serving_
        server.start()
        await with_timeout(becomes(serving_))


async def test_an_override_ends_everywhere_though_redis_is_gone(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        # Long enough for the other sidecar to see it, which without a message takes half a second.
        await set_override(one, scope=FLEET, off=True, request={"ttl_seconds": 3.0})
        await wait_until(lambda: bool(two.sidecar.override_registry.active()))
        server.kill()
        await wait_until(
            lambda: (
                not (
                    one.sidecar.override_registry.active() or two.sidecar.override_registry.active()
                )
            )
        )


async def test_of_two_operators_at_two_sidecars_only_one_replaces(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server) as (one, two):
        etag = (await set_override(one, scope=FLEET, gamma=1)).held.etag
        results = await asyncio.gather(
            set_override(one, scope=FLEET, gamma=2, request={"etag": etag}),
            set_override(two, scope=FLEET, gamma=3, request={"etag": etag}),
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
        await with_timeout(one.profiling.InstallProfile(install))
    later = tmp_path / "later"
    later.mkdir()
    async with running_sidecar(later, redis_url=server.url) as two:
        await two.introduce("booted")
        await two.introduce("of-another-model", target_model="another")
        async with asyncio.timeout(60):
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
        identity = identity_of(one.sidecar.registry.find_by_engine("engine-0").spec)
        blobs = one.sidecar.store.blobs
        await blobs.put(PROFILES, identity, "01", make_profile("another").to_json())
        await one.introduce()
        await asyncio.sleep(0.3)
        assert not (await one.status()).profile_id
        await blobs.put(PROFILES, identity, "02", "no profile")
        await one.introduce()
        await asyncio.sleep(0.3)
        assert not (await one.status()).profile_id
        # What is right is found among what is not.
        right = service_pb2.PushProfileRequest(profile_json=make_profile().to_json())
        assert (await with_timeout(one.profiling.PushProfile(right))).identity == identity
        await wait_until(lambda: one.sidecar.registry.find_by_engine("engine-0").core.profile_id)


async def test_measurements_of_several_pods_are_one_profile_for_the_next(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 2) as (one, two):
        profiles = [make_profile(measured_at=f"2020-01-0{n}") for n in (1, 2)]
        for running, profile in zip((one, two), profiles, strict=True):
            request = service_pb2.PushProfileRequest(profile_json=profile.to_json())
            await with_timeout(running.profiling.PushProfile(request))
            await with_timeout(running.profiling.PushProfile(request))
        listed = await with_timeout(two.profiling.ListProfiles(service_pb2.ListProfilesRequest()))
        (stored,) = listed.profiles
        assert set(stored.measurements) == {p.profile_id for p in profiles}
        assert stored.steps == 2 * sum(c.steps for c in profiles[0].cells)
        await two.introduce()
        await wait_until(lambda: two.sidecar.registry.find_by_engine("engine-0").core.profile_id)
        assert (await two.status()).profile_id == stored.profile_id
        for name in (stored.identity, stored.profile_id):
            ask = service_pb2.GetProfileRequest(profile_id=name)
            got = Profile.from_json(
                (await with_timeout(two.profiling.GetProfile(ask))).profile_json
            )
            assert got.profile_id == stored.profile_id


async def test_where_no_profile_fits_the_field_that_differs_is_named(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        profile = make_profile()
        other = dataclasses.replace(
            profile, fingerprint=dataclasses.replace(profile.fingerprint, device="H200")
        )
        push = service_pb2.PushProfileRequest(profile_json=other.to_json())
        await with_timeout(one.profiling.PushProfile(push))
        await one.introduce()
        ask = service_pb2.GetProfileRequest(engine_id="engine-0")
        code, text = await failure(one.profiling.GetProfile(ask))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "device is 'H200' in the profile" in text
        ask = service_pb2.GetProfileRequest(profile_id="0123456789abcdef")
        code, _ = await failure(one.profiling.GetProfile(ask))
        assert code is grpc.StatusCode.NOT_FOUND
        push = service_pb2.PushProfileRequest(profile_json="{}")
        code, _ = await failure(one.profiling.PushProfile(push))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        server.kill()
        push = service_pb2.PushProfileRequest(profile_json=profile.to_json())
        code, text = await failure(one.profiling.PushProfile(push))
        assert code is grpc.StatusCode.UNAVAILABLE


async def steered(
    running: RunningSidecar, engine_id: str, clock: VirtualClock | None = None
) -> None:
    """An engine whose drafts are all accepted, in 200 steps.

    clock: the sidecar's, moved on by each step; what is learnt depends on when it decides.
    """
    session_id = await running.introduce(engine_id)
    for step in range(1, 201):
        if clock is not None:
            clock.advance(0.02)
        report = report_message(step, accepted_counts=[0, 0, 0, 4], gamma=3)
        asking = service_pb2.DecideRequest(session_id=session_id, report=report)
        await with_timeout(running.speculation.Decide(asking))


def first_position(running: RunningSidecar, engine_id: str) -> tuple[float, float]:
    core = running.sidecar.registry.find_by_engine(engine_id).core
    curve = core.traffic.estimators["mtp"].curve()
    return curve.conditional[0], curve.exposures[0]


@pytest.mark.parametrize("kind", ["file", "redis"])
async def test_a_fresh_sidecar_begins_from_what_another_has_learnt(
    tmp_path: Path, server: RedisServer, kind: str
):
    where: dict[str, Any] = {"redis_url": server.url} if kind == "redis" else {}
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock, **where) as one:
        await steered(one, "old", clock)
    # Its last words are in the store; the next sidecar, or the same again, has them.
    next_folder = tmp_path / "next" if kind == "redis" else tmp_path
    next_folder.mkdir(exist_ok=True)
    async with running_sidecar(next_folder, **where) as two:
        await two.introduce()
        await wait_until(lambda: first_position(two, "engine-0")[1] > 0)
        mean, exposures = first_position(two, "engine-0")
        assert mean > 0.9
        assert 50 < exposures <= 64
        assert "1 engines' estimates" in (await two.explain()).warm_start
        await two.introduce("of-another-model", target_model="another")
        await asyncio.sleep(0.2)
        assert first_position(two, "of-another-model")[1] == 0
    async with running_sidecar(next_folder, warm_start=False, **where) as cold:
        await cold.introduce()
        await asyncio.sleep(0.2)
        assert first_position(cold, "engine-0")[1] == 0


async def test_an_engine_that_comes_again_goes_on_from_where_it_was(tmp_path: Path):
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock) as running:
        await steered(running, "engine-0", clock)
        await running.introduce()
        assert first_position(running, "engine-0")[0] > 0.9
        assert (await running.explain()).warm_start == "this engine's session before"


async def test_what_one_access_entry_has_told_does_not_displace_what_another_has(tmp_path: Path):
    address, access = f"127.0.0.1:{free_port()}", tmp_path / "access"
    access.write_text(token_line("steer", "a", "honest") + token_line("steer", "b", "evil"))
    # What an engine has learnt depends on when it decided, and so on the clock.
    clock = VirtualClock()
    async with (
        running_sidecar(tmp_path, clock, tcp=address, access=access) as running,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = service_pb2_grpc.SpeculationServiceStub(channel)

        async def learns(token: str, name: str, accepted: int) -> None:
            metadata = (("authorization", f"Bearer {token}"),)
            request = service_pb2.IntroduceRequest(engine=engine_message(name))
            opened = await with_timeout(stub.Introduce(request, metadata=metadata))
            counts = [4 if k == accepted else 0 for k in range(4)]
            for step in range(1, 151):
                clock.advance(0.02)
                report = report_message(step, gamma=3, accepted_counts=counts)
                asking = service_pb2.DecideRequest(session_id=opened.session_id, report=report)
                await with_timeout(stub.Decide(asking, metadata=metadata))
            running.sidecar._fleet_estimates.publish(running.sidecar.registry.find_by_engine(name))

        await learns("a", "honest-0", 3)
        # Many unknown engines report the opposite.
        for number in range(20):
            await learns("b", f"evil-{number}", 0)
        for token, name in (("a", "honest-1"), ("b", "evil-x")):
            request = service_pb2.IntroduceRequest(engine=engine_message(name))
            await with_timeout(
                stub.Introduce(request, metadata=(("authorization", f"Bearer {token}"),))
            )
            await wait_until(lambda name=name: first_position(running, name)[1] > 0)
        assert first_position(running, "honest-1")[0] > 0.9
        assert first_position(running, "evil-x")[0] < 0.2
        # Who has neither's entry begins between the two, and not where the louder one is.
        await running.introduce("third")
        await wait_until(lambda: first_position(running, "third")[1] > 0)
        assert 0.3 < first_position(running, "third")[0] < 0.7


async def test_estimates_on_the_shelf_that_are_none_harm_nobody(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        await steered(one, "old")
        one.sidecar.registry.expire()
        with server.client() as client:
            await one.introduce("old")  # ends the session before, which tells
            shelf = "{speculation:1}:acceptance"
            # The sidecar writes beside this, on the same event loop.
            await wait_until(lambda: client.zcard(shelf))
            (key,) = client.zrange(shelf, 0, -1)
            # Beside others they are left out.
            now = round(time.time() * 1000)
            junk = {"01": b"\xff", "02": f'{{"at": {now}, "text": "no"}}', "03": '{"at": 1e400}'}
            client.hset(f"{{speculation:1}}:acceptance:{key}", mapping=junk)
            await one.introduce("beside")
            await wait_until(lambda: first_position(one, "beside")[1] > 0)
            for text in ('{"at": 0, "text": "no"}', '{"at": 0, "text": "[{}]"}'):
                client.delete(f"{{speculation:1}}:acceptance:{key}")
                client.hset(f"{{speculation:1}}:acceptance:{key}", "01", text)
                await one.introduce("new")
                await asyncio.sleep(0.2)
                assert first_position(one, "new")[1] == 0


async def test_a_profile_that_cannot_be_shared_is_used_all_the_same(
    tmp_path: Path, server: RedisServer
):
    async with fleet(tmp_path, server, 1) as (one,):
        await one.introduce()
        server.kill()
        install = service_pb2.InstallProfileRequest(profile_json=make_profile().to_json())
        await with_timeout(one.profiling.InstallProfile(install))
        assert (await one.status()).profile_id == make_profile().profile_id
