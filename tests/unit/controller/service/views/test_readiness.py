import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from controller.service.net.errors import AddressTakenError
from controller.service.server import Sidecar
from controller.service.views.readiness import SERVICES, STEERING, STORE
from controller.settings.settings import Settings
from controller.util.sockets import operators_path
from lab.harness.processes import free_port
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    health_stub,
    make_profile,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(channel: grpc.aio.Channel, service: str = STEERING) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    answer: health_pb2.HealthCheckResponse = await with_timeout(health_stub(channel).Check(request))
    return answer.status


async def becomes(running: RunningSidecar, wanted: int) -> None:
    watch = health_stub(running.channel).Watch(health_pb2.HealthCheckRequest(service=STEERING))
    while (await with_timeout(watch.read())).status != wanted:
        pass
    watch.cancel()


async def fetch_health(running: RunningSidecar) -> dict[str, service_pb2.ServiceHealth]:
    answer = await with_timeout(running.inspection.ListEngines(service_pb2.ListEnginesRequest()))
    return {health.service: health for health in answer.sidecar.services}


def known_shape() -> Any:
    """An engine whose costs a roofline gives: its shape and its device are known."""
    spec = engine_message("shaped")
    spec.fingerprint.device = "NVIDIA H100 80GB HBM3"
    shape = spec.shape
    shape.hidden_size, shape.vocabulary_size, shape.dense_params = 4096, 128_256, 7_000_000_000
    shape.bytes_per_weight = shape.bytes_per_kv = 2
    attention = shape.attention.add(layers=32)
    attention.grouped_query.query_heads = 32
    attention.grouped_query.kv_heads = 8
    attention.grouped_query.head_dim = 128
    drafter = spec.drafters[0].shape
    drafter.dense_params, drafter.bytes_per_weight = 250_000_000, 2
    drafter.kv_bytes_per_token = 4096
    return spec


async def test_steering_is_not_serving_until_a_profile_is_there_and_says_why(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        assert await status(running.channel) == NOT_SERVING
        assert await status(running.channel, "") == SERVING
        assert (await fetch_health(running))[STEERING].detail == (
            "no engine has introduced itself, and no profile is loaded"
        )
        # It steers all the same.
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1))
        assert (await stream.plan()).rows
        explained = {health.service: health for health in (await running.explain()).services}
        assert not explained[STEERING].serving
        assert "engine engine-0: costs are a generic prior" in explained[STEERING].detail
        assert "no profile is loaded" in explained[STEERING].detail
        install = service_pb2.InstallProfileRequest(profile_json=make_profile().to_json())
        await with_timeout(running.profiling.InstallProfile(install))
        await becomes(running, SERVING)
        explained = {health.service: health for health in (await running.explain()).services}
        assert explained[STEERING].serving
        assert not explained[STEERING].detail


async def test_a_loaded_profile_is_enough_before_the_engine_comes(tmp_path: Path):
    (tmp_path / "p.json").write_text(make_profile().to_json())
    async with running_sidecar(tmp_path, profiles=[tmp_path / "p.json"]) as running:
        assert await status(running.channel) == SERVING
        # One of another engine's is not, and the field is named.
        spec = engine_message("other", target_model="another")
        request = service_pb2.IntroduceRequest(engine=spec)
        await with_timeout(running.speculation.Introduce(request))
        await becomes(running, NOT_SERVING)
        health = (await fetch_health(running))[STEERING]
        assert "engine other: " in health.detail
        assert "target_model is 'target' in the profile and 'another'" in health.detail
        await running.introduce()
        assert not (await fetch_health(running))[STEERING].serving


@pytest.mark.parametrize(
    ("ready_with", "shaped", "serves"),
    [
        ("guess", False, True),
        ("roofline", False, False),
        ("roofline", True, True),
        ("profile", True, False),
    ],
)
async def test_a_prior_that_was_declared_good_enough_is(
    tmp_path: Path, ready_with: str, shaped: bool, serves: bool
):
    async with running_sidecar(tmp_path, ready_with=ready_with) as running:
        assert await status(running.channel) == (SERVING if ready_with == "guess" else NOT_SERVING)
        spec = known_shape() if shaped else engine_message()
        await with_timeout(running.speculation.Introduce(service_pb2.IntroduceRequest(engine=spec)))
        assert (await running.status(spec.engine_id)).costs == ("roofline" if shaped else "generic")
        assert (await fetch_health(running))[STEERING].serving == serves
        await becomes(running, SERVING if serves else NOT_SERVING)


async def test_all_other_services_serve_without_a_profile(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for service in ("", STORE, *SERVICES):
            if service != STEERING:
                assert await status(running.channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await status(running.channel, "speculation.v1.NoSuchService")


async def test_the_health_port_answers_a_kubelet_and_nobody_else(tmp_path: Path):
    port = free_port()
    async with (
        running_sidecar(tmp_path, health_port=port, health_host="127.0.0.1") as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as kubelet,
    ):
        assert await status(kubelet, "") == SERVING
        assert await status(kubelet) == NOT_SERVING
        other = RunningSidecar(running.sidecar, kubelet, kubelet)
        calls = (
            other.speculation.Introduce(service_pb2.IntroduceRequest(engine=engine_message())),
            other.inspection.ListEngines(service_pb2.ListEnginesRequest()),
            health_stub(kubelet).Watch(health_pb2.HealthCheckRequest()).read(),
        )
        for call in calls:
            assert (await failure(call))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert (await failure(status(kubelet, "nobody")))[0] is grpc.StatusCode.NOT_FOUND
        await with_timeout(running.sidecar.stop())
        assert (await failure(status(kubelet, "")))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_health_port_in_use_refuses_the_start_and_leaves_nothing_behind(tmp_path: Path):
    port = free_port()
    (tmp_path / "first").mkdir()
    async with running_sidecar(tmp_path / "first", health_port=port, health_host="127.0.0.1"):
        second = Settings.load(
            {
                "address": f"unix:{tmp_path}/controller.sock",
                "metrics_port": 0,
                "health_port": port,
                "health_host": "127.0.0.1",
            }
        )
        with pytest.raises(AddressTakenError, match=f"127.0.0.1:{port} cannot be bound"):
            await Sidecar(second).start()
    assert not (tmp_path / "controller.sock").exists()


async def test_probes_see_the_drain(tmp_path: Path):
    port = free_port()
    async with (
        running_sidecar(
            tmp_path, health_port=port, health_host="127.0.0.1", drain_seconds=60.0
        ) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as kubelet,
    ):
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        with session.register_stream(asyncio.Event()):  # a stream that is slow to end
            stopping = asyncio.create_task(running.sidecar.stop())
            await wait_until(lambda: session.end_error)
            assert await status(kubelet, "") == NOT_SERVING
        await with_timeout(stopping)


async def test_the_sidecar_says_who_it_is_and_since_when(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        answer = await with_timeout(
            running.inspection.ListEngines(service_pb2.ListEnginesRequest())
        )
        sidecar = answer.sidecar
    assert sidecar.version
    passed = sidecar.now_unix_seconds - sidecar.started_at_unix_seconds
    assert passed == pytest.approx(sidecar.uptime_seconds, abs=1.0)


@pytest.mark.parametrize("locate_socket", [lambda path: path, operators_path])
async def test_a_socket_that_was_removed_is_a_sidecar_that_is_not_well(
    tmp_path: Path, locate_socket: Any
):
    async with running_sidecar(tmp_path) as running:
        lost = locate_socket(tmp_path / "controller.sock")
        watch: Any = health_stub(running.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await with_timeout(watch.read())).status == SERVING
        lost.unlink()
        # Who is connected still hears it.
        assert (await with_timeout(watch.read())).status == NOT_SERVING
        detail_by_service = {
            one.service: one.detail for one in running.sidecar._readiness.services()
        }
        assert str(lost) in detail_by_service[""]


async def test_what_a_killed_sidecar_had_begun_to_write_is_removed(tmp_path: Path):
    profiles = tmp_path / "profiles"
    blobs = tmp_path / "controller.sock.state" / "shelf" / "profiles" / "0123"
    begun = [folder / ".name.json.4711.part" for folder in (profiles, blobs)]
    for file in begun:
        file.parent.mkdir(parents=True)
        file.write_text("{")
    async with running_sidecar(tmp_path, profile_directory=profiles):
        assert not any(file.exists() for file in begun)
