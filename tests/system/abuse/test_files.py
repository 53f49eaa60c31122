"""Files that change while a sidecar runs: a change opens, ends and breaks nothing by accident."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from controller.util.exit_codes import Exit
from controller.util.sockets import operators_path
from lab.harness.processes import free_port
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.credentials import make_authority, token_line
from tests.support.eventually import eventually
from tests.support.override_calls import make_override_request
from tests.support.service_harness import PATIENCE_SECONDS, engine_message
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process
from tests.system.abuse.calls import CODE, status_of

# A number in base 60 that no float can hold; YAML has such.
OVERFLOW = "1" + ":1" * 200 + ".5"
POLICY = """\
policies:
- {name: a, fleet: true, reason: memory, at_most: 3}
- {name: b, fleet: true, reason: r, at_least: 1}
- {name: c, engine: e1, reason: r, at_most: 2}
"""
ENTRIES = ["policy:a", "policy:b", "policy:c"]


def logged(log: Path, event: str, times: int = 1) -> None:
    """Waits until the sidecar has written `times` lines of an event."""
    eventually(lambda: log.read_text().count(f'"event": "{event}"') >= times, description=event)


@contextmanager
def operators_of(sidecar: SidecarProcess) -> Iterator[policy_pb2_grpc.PolicyServiceStub]:
    path = operators_path(Path(sidecar.address.removeprefix("unix:")))
    with grpc.insecure_channel(f"unix:{path}") as channel:
        yield policy_pb2_grpc.PolicyServiceStub(channel)


def override(name: str) -> policy_pb2.SetOverrideRequest:
    return make_override_request(name, scope={"fleet": True}, gamma=1)


def test_two_certificates_whose_names_begin_alike_are_two_engines(tmp_path: Path):
    names = ["engine-prod-a.example", "engine-prod-b.example"]
    make_authority(tmp_path, ["sidecar", *names])
    access, tcp = tmp_path / "access", free_port()
    access.write_text("".join(f"read,steer cert:{name}\n" for name in names))
    flags = (
        "--tcp", f"127.0.0.1:{tcp}", "--access", str(access), "--tls-certificate",
        str(tmp_path / "sidecar.pem"), "--tls-key", str(tmp_path / "sidecar.key"),
        "--tls-client-ca", str(tmp_path / "ca.pem"),
    )  # fmt: skip

    def introduced(name: str) -> grpc.StatusCode:
        files = (tmp_path / "ca.pem", tmp_path / f"{name}.key", tmp_path / f"{name}.pem")
        tls = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.secure_channel(f"localhost:{tcp}", tls, options) as channel:
            stub = service_pb2_grpc.SpeculationServiceStub(channel)
            request = service_pb2.IntroduceRequest(
                engine=engine_message("pod-1"), engine_secret=f"of {name}"
            )
            return status_of(stub.Introduce, request)

    with sidecar_process(tmp_path, *flags, log=tmp_path / "log"):
        assert introduced(names[0]) is CODE.OK
        assert introduced(names[1]) is CODE.ALREADY_EXISTS
        # Its own certificate is enough for the engine, also with another secret.
        assert introduced(names[0]) is CODE.OK


def test_two_entries_with_one_name_refuse_the_start(tmp_path: Path):
    access = tmp_path / "access"
    access.write_text("read cert:a.example one\nsteer cert:b.example one\n")
    started = controller(
        "serve", "--address", f"unix:{tmp_path}/s", "--metrics-port", "0", "--access", str(access)
    )
    assert started.returncode == Exit.BAD_FILE
    assert f"{access}, line 2: repeats the name of line 1" in started.stderr
    assert "Traceback" not in started.stderr


def test_an_access_list_that_loses_its_users_lets_no_others_in(tmp_path: Path):
    access, log = tmp_path / "access", tmp_path / "log"
    access.write_text(f"read uid:{os.getuid()} watcher\n")
    tokens = token_line("read,override", "secret", "boss")
    with (
        sidecar_process(tmp_path, "--access", str(access), log=log) as sidecar,
        operators_of(sidecar) as operators,
    ):
        assert status_of(operators.SetOverride, override("o1")) is CODE.PERMISSION_DENIED
        for number, left in enumerate(("", tokens, "# no users\n"), 1):
            access.write_text(left)
            logged(log, "access_read", number)
            assert status_of(operators.SetOverride, override("o2")) is CODE.UNAUTHENTICATED
        access.unlink()
        logged(log, "access_not_read")
        assert status_of(operators.SetOverride, override("o3")) is CODE.UNAUTHENTICATED
        # Who is named gets in again.
        access.write_text(f"read,override uid:{os.getuid()}\n")
        logged(log, "access_read", 4)
        assert status_of(operators.SetOverride, override("o4")) is CODE.OK


def test_a_token_does_not_get_onto_an_open_line_by_a_change(tmp_path: Path):
    access, log, tcp = tmp_path / "access", tmp_path / "log", free_port()
    access.write_text("read uid:0\n")
    line = token_line("read,override", "secret", "boss")
    flags = ("--access", str(access), "--tcp", f"0.0.0.0:{tcp}")
    with sidecar_process(tmp_path, *flags, log=log):
        access.write_text(line)
        logged(log, "access_not_read")
        with grpc.insecure_channel(f"127.0.0.1:{tcp}") as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.SetOverride(
                    override("o1"),
                    metadata=(("authorization", "Bearer secret"),),
                    timeout=PATIENCE_SECONDS,
                )
        assert refused.value.code() is CODE.UNAUTHENTICATED
    assert "they would be sent unencrypted" in log.read_text()


def test_no_policy_file_ends_its_watch_or_what_was_in_force(tmp_path: Path):
    path, log = tmp_path / "policy.yaml", tmp_path / "log"
    path.write_text(POLICY)
    environment = {"CONTROLLER_POLICY": str(path)}
    with (
        sidecar_process(tmp_path, environment=environment, log=log) as sidecar,
        operators_of(sidecar) as operators,
    ):

        def listed() -> policy_pb2.ListOverridesResponse:
            request = policy_pb2.ListOverridesRequest()
            return operators.ListOverrides(request, timeout=PATIENCE_SECONDS)

        def refused() -> str:
            status = listed().policy
            return "" if status.ok else status.detail

        overflow = POLICY.replace("at_most: 3", f"at_most: {OVERFLOW}")
        no_character = POLICY.replace("memory", '"\\UFFFFFFFF"')
        for content, message in (
            (overflow, "line 2: a number with more than 64 characters"),
            ("", "the file is empty"),
            (no_character, "line 2: a value cannot be read"),
            (POLICY[:70], "line 3: "),
            ("# Policy of the fleet.\n", "the file is empty or has only comments"),
            (POLICY.replace("at_most: 3", "at_most: 0x" + "f" * 5000), "a number with more than"),
        ):
            path.write_text(content)
            eventually(lambda message=message: message in refused(), description=message)  # type: ignore[misc]
            assert [held.override.override_id for held in listed().overrides] == ENTRIES
        path.write_text(POLICY.replace("at_most: 3", "at_most: 4"))
        eventually(
            lambda: listed().overrides[0].override.rule.gamma_max == 4, description="the change"
        )
        assert listed().policy.ok
        path.write_text("policies: []\n")
        eventually(lambda: not listed().overrides, description="the empty policy")
    assert "Traceback" not in log.read_text()
    assert "task_failed" not in log.read_text()


def test_a_start_with_such_a_file_is_refused_in_words(tmp_path: Path):
    policy, settings = tmp_path / "policy.yaml", tmp_path / "controller.yaml"
    policy.write_text(POLICY.replace("at_most: 3", f"at_most: {OVERFLOW}"))
    serve = ("serve", "--address", f"unix:{tmp_path}/s", "--metrics-port", "0")
    started = controller(*serve, environment={"CONTROLLER_POLICY": str(policy)})
    assert started.returncode == Exit.BAD_FILE
    assert f"{policy}, line 2: a number with more than 64 characters" in started.stderr
    settings.write_text(f"max_engines: {OVERFLOW}\n")
    shown = controller("config", "--config", str(settings))
    assert shown.returncode == Exit.USAGE
    assert f"{settings}, line 1: a number with more than 64 characters" in shown.stderr
    for text in (started.stderr, shown.stderr):
        assert "Traceback" not in text
