"""Checks what needs no call to the sidecar: the socket, the state directory, its disk."""

import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from controller.doctor.finding import Finding, fail, ok, warn

_CONNECT_SECONDS = 2.0
_DISK_FAIL_BYTES = 16 * 1024 * 1024
_DISK_WARN_BYTES = 256 * 1024 * 1024


def check_socket(path: Path) -> Finding:
    """Checks that the socket exists and that a sidecar accepts connections on it."""
    try:
        status = path.stat()
    except PermissionError:
        return fail(
            "socket", f"{path}: uid {os.getuid()} may not look into its directory", _RUN_AS_FIX
        )
    except OSError:
        return _missing_socket(path)
    if not stat.S_ISSOCK(status.st_mode):
        return fail("socket", f"{path} is not a socket", "remove it, and start the sidecar again")
    owner = f"mode {stat.S_IMODE(status.st_mode):o}, uid {status.st_uid}, gid {status.st_gid}"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except OSError as error:
            return _unreachable_socket(path, owner, error)
    if status.st_mode & stat.S_IWOTH:
        return warn(
            "socket",
            f"{path}: {owner}: every user may steer the engine",
            "chmod 660, or restart it",
        )
    return ok("socket", f"{path}: {owner}, answers")


_RUN_AS_FIX = "run as the sidecar's user, or in its group (fsGroup in a pod)"


def _missing_socket(path: Path) -> Finding:
    if not path.parent.is_dir():
        return fail(
            "socket",
            f"{path.parent} does not exist",
            "mount the same volume there in the engine's and in the sidecar's container",
        )
    return fail(
        "socket",
        f"{path} does not exist",
        "start `controller serve`, or name its address with --address",
    )


def _unreachable_socket(path: Path, owner: str, error: OSError) -> Finding:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return fail("socket", f"{path}: {owner}: uid {os.getuid()} may not open it", _RUN_AS_FIX)
    if error.errno == errno.ECONNREFUSED:
        return fail(
            "socket",
            f"{path} belongs to a sidecar that no longer runs",
            "start `controller serve`: it replaces the socket",
        )
    return fail("socket", f"{path}: {error.strerror or error}", "check whether the sidecar hangs")


def check_state(directory: Path, *, has_redis: bool = False) -> list[Finding]:
    """Checks that the state directory can be written and has space.

    has_redis: overrides are in Redis.  The sidecar then creates the directory with the first
    override, so that it may be missing.
    """
    if not directory.is_dir():
        if has_redis and os.access(directory.parent, os.W_OK, effective_ids=True):
            message = f"{directory} will be created with the first override in Redis"
            return [ok("state directory", message), _check_disk(directory.parent)]
        return [
            fail(
                "state directory",
                f"{directory} does not exist",
                "start the sidecar, which creates it, or name another with state_directory",
            )
        ]
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"doctor")
            file.flush()
    except OSError as error:
        fix = "free disk space there" if error.errno == errno.ENOSPC else _WRITABLE_FIX
        return [fail("state directory", f"{directory} cannot be written: {error.strerror}", fix)]
    return [ok("state directory", f"{directory} can be written"), _check_disk(directory)]


_WRITABLE_FIX = "mount it writable, for the sidecar's user, or name another with state_directory"


def _check_disk(directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    state = f"{free / 1024**2:.0f} MiB free at {directory}"
    fix = "free disk space: overrides, audit and training states are written there"
    if free < _DISK_FAIL_BYTES:
        return fail("disk", state, fix)
    return warn("disk", state, fix) if free < _DISK_WARN_BYTES else ok("disk", state)
