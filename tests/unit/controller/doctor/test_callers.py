"""Who is connected to the engines' socket, asked of the real kernel."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from controller.doctor import Level
from controller.doctor.finding import Finding
from controller.doctor.processes import check_callers
from tests.support.service_harness import ENVIRONMENT, running_sidecar, wait_until
from tests.unit.controller.doctor.test_local import public

__all__ = ["public"]

NOBODY = 65_534
CONNECT = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
caller = socket.socket(socket.AF_UNIX)
caller.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


def checked(engines: Path, proc: Path) -> Finding:
    (finding,) = check_callers(engines, proc)
    return finding


async def test_the_sidecars_user_in_another_container_is_an_operator(tmp_path: Path):
    (elsewhere := tmp_path / "proc").mkdir()  # of a container whose processes are not seen
    path = tmp_path / "controller.sock"
    async with running_sidecar(tmp_path):
        assert checked(path, elsewhere).level is Level.OK
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            # The kernel names both ends once the sidecar has accepted the connection.
            await wait_until(lambda: checked(path, elsewhere).level is Level.WARN)
            finding = checked(path, elsewhere)
            assert ("root" if os.getuid() == 0 else f"uid {os.getuid()}") in finding.state
            assert str(tmp_path / "controller-operators.sock") in finding.state
            assert "operators_directory" in finding.fix
            # The same process, seen: it is the operator's own.
            assert checked(path, Path("/proc")).level is Level.OK
        assert checked(path, elsewhere).level is Level.OK


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
async def test_an_engine_with_a_user_of_its_own_is_none(public: Path):
    (elsewhere := public / "proc").mkdir()
    path = public / "controller.sock"
    async with running_sidecar(public):
        path.chmod(0o666)
        with subprocess.Popen(  # noqa: ASYNC220  # it is only started here
            [sys.executable, "-c", CONNECT, str(path), str(NOBODY)],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as engine:  # fmt: skip
            assert engine.stdout is not None
            assert engine.stdout.readline() == "connected\n"
            assert checked(path, elsewhere).level is Level.OK
            engine.communicate()


async def test_sockets_in_two_directories_are_well_whoever_calls(tmp_path: Path):
    (elsewhere := tmp_path / "proc").mkdir()
    path = tmp_path / "controller.sock"
    async with running_sidecar(tmp_path, operators_directory=tmp_path / "o"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            finding = checked(path, elsewhere)
    assert finding.level is Level.OK
    assert str(tmp_path / "o" / "controller-operators.sock") in finding.state


def test_without_sockets_there_is_nothing_to_say(tmp_path: Path):
    assert list(check_callers(tmp_path / "controller.sock")) == []
