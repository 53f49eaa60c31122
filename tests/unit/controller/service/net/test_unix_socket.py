import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller.service.net.unix_sockets import SocketTakenError, claim_path, remove_same_file
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS


def listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_a_free_path_is_bound_for_owner_and_group_only(tmp_path: Path):
    path = tmp_path / "new" / "s"
    before = os.umask(0)
    try:
        with claim_path(path), socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            # From the first moment on, not only once the block is left.
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


def test_a_dead_ones_socket_is_removed(tmp_path: Path):
    path = tmp_path / "s"
    listen(path).close()
    assert path.exists()
    with claim_path(path), listen(path):
        pass


def test_a_living_ones_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "s"
    with listen(path):
        with (
            pytest.raises(SocketTakenError, match=r"another sidecar is serving on .*/s"),
            claim_path(path),
        ):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


SECOND = """
import sys
from pathlib import Path
from controller.service.net.unix_sockets import SocketTakenError, claim_path
print("trying", flush=True)
try:
    with claim_path(Path(sys.argv[1])):
        print("free")
except SocketTakenError as error:
    print(error)
"""


def test_of_two_that_start_together_the_second_waits_and_sees_the_first(tmp_path: Path):
    path = tmp_path / "s"
    with claim_path(path):
        second = subprocess.Popen(
            [sys.executable, "-c", SECOND, str(path)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdout is not None
        assert second.stdout.readline() == "trying\n"
        # Right however long this is; long enough to fail if no call waited.
        time.sleep(0.2)
        server = listen(path)
    answer, _ = second.communicate(timeout=PATIENCE_SECONDS)
    server.close()
    assert "another sidecar is serving" in answer


def test_a_busy_ones_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "s"
    waiting = []
    with listen(path) as server:
        server.listen(0)
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            waiting.append(client)
            client.connect_ex(str(path))
        with pytest.raises(SocketTakenError, match="another sidecar"), claim_path(path):
            pass
    for client in waiting:
        client.close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(SocketTakenError, match="is not a socket"), claim_path(path):
        pass
    assert path.read_text() == "precious"


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path):
    with pytest.raises(SocketTakenError, match="107 bytes"), claim_path(tmp_path / ("x" * 100)):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SocketTakenError, match="cannot be used"),
        claim_path(tmp_path / "file" / "s"),
    ):
        pass


def test_only_the_own_socket_is_removed_in_the_end(tmp_path: Path):
    path = tmp_path / "s"
    with listen(path):
        inode = path.stat().st_ino
        remove_same_file(path, inode + 1)
        assert path.exists()
        remove_same_file(path, inode)
        assert not path.exists()
        remove_same_file(path, inode)
