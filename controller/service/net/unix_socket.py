"""Taking a unix socket's path: never from a living sidecar, always from a dead one.

gRPC unlinks whatever socket it finds before it binds, so two sidecars on one path would silently
take turns.  Here the path is looked at first, under a lock on its directory, so that of two that
start together one sees the other.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.core.errors import SpeculationError

_MODE = 0o660
_DIRECTORY_MODE = 0o750
# sockaddr_un.sun_path, less its closing zero.
_PATH_BYTES_MAX = 107
_PROBE_SECONDS = 1.0


class SocketTakenError(SpeculationError):
    """The path cannot be bound: someone serves there, or it is something else."""


def opened_directory(path: Path) -> int:
    """Opens the directory of a socket, which is made if it does not exist; its descriptor.

    Raises SocketTakenError.
    """
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        return os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SocketTakenError(
            f"the directory of {path} cannot be used: {error.strerror}; name another socket with "
            "--address unix:PATH"
        ) from error


@contextmanager
def claimed(path: Path, mode: int = _MODE) -> Iterator[None]:
    """Bind inside the block: the path is free there, and what is bound gets the mode.

    Raises SocketTakenError.
    """
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise SocketTakenError(f"{path}: a socket's path is {_PATH_BYTES_MAX} bytes at most")
    directory = opened_directory(path)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        remove_if_dead(path)
        umask = os.umask(0o777 & ~mode)
        try:
            yield
        finally:
            os.umask(umask)
        path.chmod(mode)
    finally:
        os.close(directory)


def remove_if_dead(path: Path) -> None:
    """Removes the socket, or the link to one, that a sidecar has left behind.

    Raises SocketTakenError if it is served, or is something else.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            mode = path.stat().st_mode
    except FileNotFoundError:
        # There is nothing, or a link to nothing.
        path.unlink(missing_ok=True)
        return
    except OSError as error:
        # A link that leads where this process may not look, or to itself.
        raise SocketTakenError(f"{path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise SocketTakenError(f"{path} exists and is not a socket: remove it or name another path")
    if _is_served(path):
        raise SocketTakenError(
            f"another sidecar is serving on {path}: stop it, or name another socket with "
            "--address unix:PATH"
        )
    path.unlink()


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError as error:
            # A full backlog is a living server's; what cannot be asked is not taken away.
            if error.errno in {errno.EAGAIN, errno.ETIMEDOUT} or isinstance(error, TimeoutError):
                return True
            raise SocketTakenError(f"{path} cannot be looked at: {error.strerror}") from error
    return True


def is_own(path: Path, inode: int) -> bool:
    """Whether the socket file is still the one that was bound."""
    try:
        return path.lstat().st_ino == inode
    except OSError:
        return False


def remove_own(path: Path, inode: int) -> None:
    """Removes the socket file, unless it is another one by now."""
    if is_own(path, inode):
        path.unlink(missing_ok=True)
