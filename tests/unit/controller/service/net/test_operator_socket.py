"""The operators' socket: the kernel says who is there, and only then is a caller let in."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import structlog

from controller.service.net import unix_sockets
from controller.service.net.unix_sockets import SocketTakenError
from controller.util.sockets import operators_path
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2
from tests.support.override_calls import FLEET, make_override_request, set_override
from tests.support.permitted_calls import CallProbe
from tests.support.service_harness import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    RunningSidecar,
    failure,
    running_sidecar,
    wait_until,
    with_timeout,
)

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED
NOBODY = 65534


async def test_a_second_sidecar_that_is_refused_leaves_the_firsts_door_open(tmp_path: Path):
    async with running_sidecar(tmp_path) as first:
        with pytest.raises(SocketTakenError):
            async with running_sidecar(tmp_path):
                pass
        await set_override(first, scope=FLEET, gamma=1)


async def as_user(uid: int, address: Path, name: str) -> str:
    """The code and message of an override set by a process of that user."""
    program = (
        "import grpc, os, sys\n"
        "from speculation.v1 import policy_pb2 as p, policy_pb2_grpc as g\n"
        f"os.setgid({uid}); os.setuid({uid})\n"
        "stub = g.PolicyServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
        f"o = p.Override(override_id='{name}', scope=p.Scope(fleet=True), author='x', reason='y',\n"
        "               rule=p.OverrideRule(off=True))\n"
        "try:\n"
        f"    stub.SetOverride(p.SetOverrideRequest(override=o), timeout={PATIENCE_SECONDS})\n"
        "    print('OK')\n"
        "except grpc.RpcError as error:\n"
        "    print(error.code().name, error.details())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, f"unix:{address}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def origins(running: RunningSidecar) -> list[str]:
    query = policy_pb2.QueryAuditRequest()
    return [r.origin for r in (await with_timeout(running.policy.QueryAudit(query))).records]


def opened_to_all(tmp_path: Path) -> Path:
    """As an operator would who lets others in by the mode; the way there is open too."""
    path = operators_path(tmp_path / "controller.sock")
    path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    return path


async def test_only_the_sidecars_own_user_gets_in_by_default(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        path = operators_path(tmp_path / "controller.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await set_override(running, scope=FLEET, off=True)
        (origin,) = await origins(running)
        assert origin.startswith(f"uid {os.getuid()}, gid {os.getgid()}, pid {os.getpid()} (")
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
async def test_another_user_is_told_apart_and_named_in_the_audit(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        path = operators_path(tmp_path / "controller.sock")
        assert (await as_user(NOBODY, path, "shut-out")).startswith("UNAVAILABLE")
        opened_to_all(tmp_path)
        assert await as_user(NOBODY, path, "let-in") == "OK"
        (origin,) = await origins(running)
        assert origin.startswith(f"uid {NOBODY}, gid {NOBODY}, pid ")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
async def test_an_access_list_with_users_decides_among_them(tmp_path: Path):
    access = tmp_path / "access"
    access.write_text("read,override uid:0 root\nread gid:65534 guests\n")
    async with running_sidecar(tmp_path, access=access) as running:
        path = opened_to_all(tmp_path)
        assert await CallProbe(running.operators).override("o1") is OK
        assert "guests does not have the right to override" in await as_user(NOBODY, path, "o2")
        access.write_text("read uid:0 root\n")
        with structlog.testing.capture_logs() as lines:
            await wait_until(lambda: lines)
        assert lines[0]["event"] == "access_read"
        assert await CallProbe(running.operators).override("o3") is DENIED
        assert "has no entry for uid 65534" in await as_user(NOBODY, path, "o4")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_the_server_behind_the_door_has_no_address(tmp_path: Path):
    async with running_sidecar(tmp_path):
        names = names_in(tmp_path) - {"controller.sock.state"}
        assert names == {"controller.sock", "controller-operators.sock"}


async def test_operators_beyond_the_bound_are_refused_and_places_come_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unix_sockets, "_CONNECTIONS_MAX", 2)
    path = operators_path(tmp_path / "controller.sock")
    async with running_sidecar(tmp_path) as running:
        streams = [await asyncio.open_unix_connection(path) for _ in range(2)]
        await wait_until(lambda: len(running.sidecar.operator_socket.peers) == 2)
        reader, writer = await asyncio.open_unix_connection(path)
        assert await with_timeout(reader.read()) == b""
        writer.close()
        for _, stream in streams:
            stream.close()
        await wait_until(lambda: not running.sidecar.operator_socket.peers)
        assert await CallProbe(running.operators).override("o1") is OK


async def test_one_who_sends_rubbish_or_nothing_disturbs_nobody(tmp_path: Path):
    path = operators_path(tmp_path / "controller.sock")
    async with running_sidecar(tmp_path) as running:
        _, silent = await asyncio.open_unix_connection(path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(os.urandom(100_000))
        await with_timeout(reader.read())
        assert await CallProbe(running.operators).override("o1") is OK
        writer.close()
        silent.close()
        await wait_until(lambda: len(running.sidecar.operator_socket.peers) == 1)


async def test_watching_and_long_answers_pass_whole(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for number in range(60):
            await set_override(running, name=f"o{number}", scope=FLEET, gamma=1, reason="r" * 500)
        answer = await with_timeout(
            running.policy.QueryAudit(policy_pb2.QueryAuditRequest(limit=1000))
        )
        assert len(answer.records) == 60
        assert len(answer.SerializeToString()) > 60_000


async def test_after_a_kill_the_sockets_left_behind_are_taken_over(tmp_path: Path):
    main = tmp_path / "controller.sock"
    command = [sys.executable, "-m", "controller.cli", "serve", "--metrics-port", "0"]
    process = subprocess.Popen(  # noqa: ASYNC220  # it is only started here
        [*command, "--address", f"unix:{main}"],
        env=ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    )
    await wait_until(operators_path(main).exists)
    process.kill()
    await asyncio.to_thread(process.wait)
    assert operators_path(main).exists()
    async with running_sidecar(tmp_path) as running:
        assert await CallProbe(running.operators).override("o1") is OK
        answer = running.inspection.ListEngines(service_pb2.ListEnginesRequest())
        await with_timeout(answer)
        stub = policy_pb2_grpc.PolicyServiceStub(running.channel)
        code, text = await failure(stub.SetOverride(make_override_request("o2", off=True)))
        assert code is DENIED
        assert str(operators_path(main)) in text


async def test_in_a_directory_of_its_own_it_is_found_by_a_link(tmp_path: Path):
    own = tmp_path / "o" / "controller-operators.sock"
    link_path = operators_path(tmp_path / "controller.sock")
    own.parent.mkdir()
    # What sidecars that were killed have left behind: one had it elsewhere, the other one here.
    for left in (tmp_path / "g" / "controller-operators.sock", own):
        link_path.symlink_to(left)
        if left == own:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(own))
        async with running_sidecar(tmp_path, operators_directory=own.parent) as running:
            assert stat.S_IMODE(own.lstat().st_mode) == 0o600
            assert link_path.readlink() == own
            await set_override(running, scope=FLEET, off=True)
            with pytest.raises(SocketTakenError):
                async with running_sidecar(tmp_path, operators_directory=own.parent):
                    pass
            assert not running.sidecar.operator_socket.missing_files_reason
            link_path.unlink()
            assert str(link_path) in running.sidecar.operator_socket.missing_files_reason
        assert not own.exists()
        assert not link_path.is_symlink()


async def test_a_file_where_the_link_would_be_refuses_the_start_and_stays(tmp_path: Path):
    link_path = operators_path(tmp_path / "controller.sock")
    link_path.write_text("mine")
    with pytest.raises(SocketTakenError, match="is not a socket"):
        async with running_sidecar(tmp_path, operators_directory=tmp_path / "operators"):
            pass
    assert link_path.read_text() == "mine"


async def test_a_link_that_leads_to_itself_refuses_the_start_and_stays(tmp_path: Path):
    link = operators_path(tmp_path / "controller.sock")
    link.symlink_to(link)
    with pytest.raises(SocketTakenError, match="cannot be checked"):
        async with running_sidecar(tmp_path, operators_directory=tmp_path / "operators"):
            pass
    assert link.is_symlink()


def test_who_may_not_enter_that_directory_is_told(tmp_path: Path):
    own = tmp_path / "operators" / "controller-operators.sock"
    own.parent.mkdir()
    link_path = operators_path(tmp_path / "controller.sock")
    link_path.symlink_to(own)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    own.parent.chmod(0o700)
    program = (
        "import os, sys\n"
        "from controller.util.sockets import permission_denied_reason\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(permission_denied_reason(sys.argv[1]))\n"
    )
    if os.getuid() != 0:
        own.parent.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", program, f"unix:{link_path}"],
        env=ENVIRONMENT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    own.parent.chmod(0o700)
    assert f"permission denied: {own.parent} has mode" in done.stdout
