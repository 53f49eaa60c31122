import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from controller.service.net.errors import StartRefusedError
from controller.service.net.limits import TokenBucket
from controller.service.net.unix_sockets import SocketTakenError
from controller.service.server import Sidecar
from controller.service.state.profile_registry import ProfileFileError
from controller.service.views.readiness import SERVICES
from controller.settings.settings import Settings
from lab.harness.processes import free_port
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    ENVIRONMENT,
    SteerClient,
    engine_message,
    failure,
    health_stub,
    report_message,
    running_sidecar,
    with_timeout,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def settings(directory: Path, **changes: object) -> Settings:
    return Settings.load(
        {"address": f"unix:{directory}/controller.sock", "metrics_port": 0} | changes
    )


@pytest.mark.parametrize("service", ["", *SERVICES])
async def test_each_service_reports_its_health(tmp_path: Path, service: str):
    async with running_sidecar(tmp_path, ready_with="guess") as running:
        health = health_stub(running.channel)
        answer = await with_timeout(health.Check(health_pb2.HealthCheckRequest(service=service)))
    assert answer.status == SERVING


async def test_watchers_learn_of_the_end_and_do_not_hold_it_up(tmp_path: Path):
    async with running_sidecar(tmp_path, drain_seconds=3600.0) as running:
        health = health_stub(running.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await with_timeout(watch.read())).status == SERVING
        await with_timeout(running.sidecar.stop())
        assert (await with_timeout(watch.read())).status == NOT_SERVING


async def test_reflection_lists_the_services_and_their_methods(tmp_path: Path):
    def ask() -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(f"unix:{tmp_path}/controller.sock") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = list(database.get_services())
            file = database.FindFileContainingSymbol("speculation.v1.SpeculationService")
            return services, [method.name for method in file.service[0].method]

    async with running_sidecar(tmp_path):
        services, methods = await with_timeout(asyncio.to_thread(ask))
    assert {*SERVICES, "grpc.health.v1.Health"} <= set(services)
    assert methods == ["Introduce", "Steer", "Decide"]


@pytest.mark.parametrize("version", ["grpc-v1", "grpc-v1alpha"])
async def test_a_client_of_another_language_finds_every_method_by_reflection(
    tmp_path: Path, version: str
):
    buf = Path(sys.executable).with_name("buf")
    async with running_sidecar(tmp_path):
        arguments = (
            "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", version,
            "--unix-socket", f"{tmp_path}/controller.sock", "--list-methods", "http://localhost",
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            buf, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, trouble = await with_timeout(process.communicate())
    assert process.returncode == 0, trouble
    methods = set(output.decode().split())
    assert "speculation.v1.PolicyService/GetOverride" in methods
    assert "grpc.health.v1.Health/Check" in methods
    for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
        assert f"{package}.ServerReflection/ServerReflectionInfo" in methods


async def test_reflection_can_be_left_out(tmp_path: Path):
    def ask() -> None:
        with grpc.insecure_channel(f"unix:{tmp_path}/controller.sock") as channel:
            ProtoReflectionDescriptorDatabase(channel).get_services()

    async with running_sidecar(tmp_path, reflection=False):
        with pytest.raises(grpc.RpcError):
            await with_timeout(asyncio.to_thread(ask))


async def test_the_socket_is_for_owner_and_group_and_goes_with_the_sidecar(tmp_path: Path):
    path = tmp_path / "controller.sock"
    async with running_sidecar(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


async def test_a_second_sidecar_on_the_socket_is_refused_and_the_first_serves_on(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        with pytest.raises(SocketTakenError, match="another sidecar is serving"):
            await Sidecar(settings(tmp_path)).start()
        await running.introduce()


async def test_two_sidecars_that_start_together_do_not_share_a_socket(tmp_path: Path):
    both = [Sidecar(settings(tmp_path)) for _ in range(2)]
    outcome = await asyncio.gather(*(one.start() for one in both), return_exceptions=True)
    assert [type(error) for error in outcome if error] == [SocketTakenError]
    for one in both:
        await one.stop()


async def test_tcp_is_served_beside_the_socket_when_asked_for(tmp_path: Path):
    address = f"127.0.0.1:{free_port()}"
    async with (
        running_sidecar(tmp_path, tcp=address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        request = service_pb2.IntroduceRequest(engine=engine_message())
        assert (await with_timeout(stub.Introduce(request))).session_id


async def test_a_port_in_use_refuses_the_start_and_leaves_nothing_behind(tmp_path: Path):
    port = free_port()
    (tmp_path / "first").mkdir()
    async with running_sidecar(
        tmp_path / "first", metrics_port=port, tcp=f"127.0.0.1:{free_port()}"
    ) as one:
        with pytest.raises(StartRefusedError, match=rf"/metrics cannot be served on .*:{port}"):
            await Sidecar(settings(tmp_path, metrics_port=port)).start()
        assert not (tmp_path / "controller.sock").exists()
        taken = one.sidecar._settings.tcp
        with pytest.raises(StartRefusedError, match=f"{taken} cannot be bound"):
            await Sidecar(settings(tmp_path, tcp=taken)).start()
        assert not (tmp_path / "controller.sock").exists()


async def test_a_broken_profile_refuses_the_start(tmp_path: Path):
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ProfileFileError, match=r"p\.json: not JSON"):
        await Sidecar(settings(tmp_path, profiles=(tmp_path,))).start()
    assert not (tmp_path / "controller.sock").exists()


async def test_open_streams_are_told_that_the_sidecar_goes(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1))
        await stream.plan()
        measuring = running.profiling.Measure()
        await with_timeout(
            measuring.write(
                service_pb2.MeasureRequest(engine_id="engine-0", drafter="mtp", gamma=1)
            )
        )
        await with_timeout(measuring.read())
        await with_timeout(running.sidecar.stop())
        code, message = await stream.end()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in message
        assert (await failure(measuring.read()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_message_beyond_the_limit_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path, max_message_bytes=64 * 1024) as running:
        request = service_pb2.InstallProfileRequest(profile_json="x" * 70_000)
        code, _ = await failure(running.profiling.InstallProfile(request))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_engines_beyond_the_limit_are_refused(tmp_path: Path):
    async with running_sidecar(tmp_path, max_engines=1) as running:
        await running.introduce("a")
        request = service_pb2.IntroduceRequest(engine=engine_message("b"))
        code, message = await failure(running.speculation.Introduce(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "CONTROLLER_MAX_ENGINES" in message


async def test_a_client_that_does_not_read_holds_the_end_up_no_longer_than_the_drain(
    tmp_path: Path,
):
    async with running_sidecar(tmp_path, drain_seconds=0.3) as running:
        stream = SteerClient(running, await running.introduce())
        session = running.sidecar.registry.find_by_engine("engine-0")
        session.refusal_bucket = TokenBucket(1e9, 1e9)
        bad = [report_message(step, drafter="x" * 300) for step in range(1, 257)]

        async def flood() -> None:
            while True:
                await stream.call.write(
                    service_pb2.SteerRequest(session_id=stream.session_id, reports=bad)
                )

        flooding = asyncio.create_task(flood())
        # Every report is refused; the answers pile up until the sidecar stops reading.
        before, unsent = -1, 0
        while unsent < 256 or session.counters.rejected.total() > before:
            before = session.counters.rejected.total()
            await asyncio.sleep(0.3)
            unsent = len(session.stream._rejections) if session.stream else 0  # type: ignore[attr-defined]
        with structlog.testing.capture_logs() as lines:
            await with_timeout(running.sidecar.stop())
        assert "drain_ran_out" in {line["event"] for line in lines}
        await failure(flooding)


_RUN = """
import asyncio, gc, os, signal, sys
from controller.service.server import Sidecar
from controller.settings.settings import Settings

async def main():
    sidecar = Sidecar(Settings.load({"address": sys.argv[1], "metrics_port": 0}))
    running = asyncio.create_task(sidecar.run())
    async with asyncio.timeout(60):
        while not gc.get_freeze_count():
            await asyncio.sleep(0.01)
    print(gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)
    await running

asyncio.run(main())
"""


def test_a_full_collection_does_not_look_at_what_the_start_has_made(tmp_path: Path):
    command = [sys.executable, "-c", _RUN, f"unix:{tmp_path}/controller.sock"]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    passed_over, looked_at = map(int, done.stderr.split())
    assert passed_over > 10 * looked_at
