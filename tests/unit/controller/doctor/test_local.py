import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.doctor import Level, local
from controller.doctor.finding import Finding

NOBODY = 65_534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may do everything: a test of what may not be done needs another user."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user may enter, and only this one may write to."""
    # Tests beside each other have a directory more.
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    yield tmp_path
    tmp_path.chmod(0o755)


@contextmanager
def listening(path: Path, mode: int = 0o660) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(mode)
        yield path


def is_(finding: Finding, level: Level, expected_name: str, fix: str = "") -> bool:
    assert finding.level is level, finding
    assert expected_name in finding.state, finding
    assert fix in finding.fix, finding
    assert bool(finding.fix) == (level is not Level.OK)
    return True


def test_a_socket_that_answers(tmp_path: Path):
    with listening(tmp_path / "s") as path:
        assert is_(local.check_socket(path), Level.OK, "mode 660")


def test_a_socket_that_anyone_may_open(tmp_path: Path):
    with listening(tmp_path / "s", 0o666) as path:
        assert is_(local.check_socket(path), Level.WARN, "mode 666", "chmod 660")


def test_no_directory_no_socket_no_listener_and_no_socket_at_all(tmp_path: Path):
    check = local.check_socket
    assert is_(check(tmp_path / "a" / "s"), Level.FAIL, "does not exist", "mount the same volume")
    assert is_(check(tmp_path / "s"), Level.FAIL, "does not exist", "controller serve")
    with listening(tmp_path / "dead"):
        pass
    assert is_(check(tmp_path / "dead"), Level.FAIL, "no longer runs", "replaces the socket")
    (tmp_path / "file").write_text("")
    assert is_(check(tmp_path / "file"), Level.FAIL, "is not a socket", "remove it")


def test_a_socket_of_somebody_else(public: Path):
    with listening(public / "s", 0o600) as path:
        if os.geteuid():
            path.chmod(0)
        with as_nobody():
            assert is_(local.check_socket(path), Level.FAIL, "may not open it", "fsGroup")
    (public / "closed").mkdir()
    with listening(public / "closed" / "s") as path:
        path.parent.chmod(0 if os.geteuid() else 0o700)
        with as_nobody():
            finding = local.check_socket(path)
        path.parent.chmod(0o700)
        assert is_(finding, Level.FAIL, "may not look into its directory", "fsGroup")


def test_a_state_directory_that_can_be_written_with_room(tmp_path: Path):
    state, disk = local.check_state(tmp_path)
    assert is_(state, Level.OK, str(tmp_path))
    assert disk.check == "disk"
    assert not list(tmp_path.iterdir())


def test_a_state_directory_that_is_missing_or_not_ours(public: Path):
    [missing] = local.check_state(public / "nowhere")
    assert is_(missing, Level.FAIL, "does not exist", "state_directory")
    public.chmod(0o555)
    with as_nobody():
        [finding] = local.check_state(public)
    assert is_(finding, Level.FAIL, "cannot be written: Permission denied", "writable")


def test_beside_redis_a_state_directory_may_be_missing_until_there_is_an_override(public: Path):
    state, disk = local.check_state(public / "later", has_redis=True)
    assert is_(state, Level.OK, "will be created")
    assert disk.check == "disk"
    public.chmod(0o555)
    with as_nobody():
        [finding] = local.check_state(public / "later", has_redis=True)
    assert is_(finding, Level.FAIL, "does not exist", "state_directory")


@pytest.mark.parametrize(("limit", "level"), [("_FAIL", Level.FAIL), ("_WARN", Level.WARN)])
def test_a_disk_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, level: Level
):
    monkeypatch.setattr(local, f"_DISK{limit}_BYTES", 2**62)
    assert is_(local.check_state(tmp_path)[1], level, "MiB free", "free disk space")
