import queue
import signal
from pathlib import Path

import grpc
import pytest

from controller.util.exit_codes import Exit
from lab.harness.processes import free_port
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    engine_message,
    make_profile,
    report_message,
)
from tests.support.sidecar_process import controller, sidecar_process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_sidecar_cleanly_with_its_streams(tmp_path: Path, number: signal.Signals):
    with sidecar_process(tmp_path) as sidecar, grpc.insecure_channel(sidecar.address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        session = stub.Introduce(
            service_pb2.IntroduceRequest(engine=engine_message()), timeout=PATIENCE_SECONDS
        )
        sent: queue.SimpleQueue[service_pb2.SteerRequest | None] = queue.SimpleQueue()
        sent.put(
            service_pb2.SteerRequest(
                session_id=session.session_id,
                reports=[report_message(step) for step in range(1, 101)],
            )
        )
        call = stub.Steer(iter(sent.get, None), timeout=PATIENCE_SECONDS)
        assert next(call).plan.epoch >= 1
        code, lines = sidecar.stop(number)
        with pytest.raises(grpc.RpcError) as error:
            for _ in call:
                pass
        sent.put(None)
    assert code == 0
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in (error.value.details() or "")
    assert not (tmp_path / "controller.sock").exists()
    assert all({"event", "level", "timestamp", "logger"} <= set(line) for line in lines)
    # One line per change, however many steps were reported.
    assert [line["event"] for line in lines] == [
        "serving",
        "no_profile",
        "engine_introduced",
        "stream_opened",
        "stopping",
        "stream_closed",
        "stopped",
    ]


def test_a_sidecar_that_was_stopped_is_started_again_on_its_socket_and_steers(tmp_path: Path):
    for _ in range(2):
        with sidecar_process(tmp_path) as sidecar:
            with grpc.insecure_channel(sidecar.address) as channel:
                answer = service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                    service_pb2.IntroduceRequest(engine=engine_message()), timeout=PATIENCE_SECONDS
                )
            assert answer.plan.rows
            code, lines = sidecar.stop()
        assert code == 0
        assert [line["event"] for line in lines][:1] == ["serving"]


def test_the_socket_of_a_killed_sidecar_is_taken_over(tmp_path: Path):
    with sidecar_process(tmp_path) as sidecar:
        sidecar.stop(signal.SIGKILL)
    assert (tmp_path / "controller.sock").is_socket()
    with sidecar_process(tmp_path) as sidecar:
        assert sidecar.stop()[0] == 0


def test_a_second_sidecar_on_the_socket_says_who_is_in_the_way(tmp_path: Path):
    with sidecar_process(tmp_path) as sidecar:
        second = controller("serve", "--address", sidecar.address, "--metrics-port", "0")
        assert second.returncode == Exit.TAKEN
        assert "another sidecar is serving on" in second.stderr
        assert "Traceback" not in second.stderr
        assert sidecar.stop()[0] == 0


def test_profiles_are_loaded_at_the_start(tmp_path: Path):
    profile = make_profile()
    (tmp_path / "p.json").write_text(profile.to_json())
    with sidecar_process(tmp_path, "--profile", str(tmp_path / "p.json")) as sidecar:
        with grpc.insecure_channel(sidecar.address) as channel:
            service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                service_pb2.IntroduceRequest(engine=engine_message()), timeout=PATIENCE_SECONDS
            )
        _, lines = sidecar.stop()
    events = {line["event"]: line for line in lines}
    assert events["profile_loaded"]["profile"] == profile.profile_id
    assert events["engine_introduced"]["profile"] == profile.profile_id
    assert "no_profile" not in events


def test_a_broken_profile_refuses_the_start_with_file_and_reason(tmp_path: Path):
    path = tmp_path / "p.json"
    path.write_text('{"format": "something else"}')
    result = controller(
        "serve", "--address", f"unix:{tmp_path}/s", "--metrics-port", "0", "--profile", str(path)
    )
    assert result.returncode == Exit.BAD_FILE
    assert f"profile {path}: format is 'something else'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (("--metrics-port", "70000"), {}, "metrics_port: "),
        (("--address", "127.0.0.1:9"), {}, "must be a unix socket, unix:PATH or /PATH"),
        (
            (),
            {"CONTROLLER_ADRESS": "unix:/x"},
            "unknown environment variable CONTROLLER_ADRESS: did you mean CONTROLLER_ADDRESS, ",
        ),
        (("--adress", "unix:/x"), {}, "No such option"),
    ],
)
def test_settings_that_cannot_be_end_with_their_own_exit_code(
    arguments: tuple[str, ...], environment: dict[str, str], text: str
):
    result = controller("serve", *arguments, environment=environment)
    assert result.returncode == Exit.USAGE
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_metrics_port_in_use_refuses_the_start(tmp_path: Path):
    port = free_port()
    with sidecar_process(tmp_path, "--metrics-port", str(port)):
        second = controller(
            "serve", "--address", f"unix:{tmp_path}/other", "--metrics-port", str(port)
        )
    assert second.returncode == Exit.TAKEN
    assert f"/metrics cannot be served on 127.0.0.1:{port}" in second.stderr
