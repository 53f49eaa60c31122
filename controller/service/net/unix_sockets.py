"""Claims the paths of unix sockets, and identifies operators by the kernel's peer credentials.

gRPC unlinks an existing socket before it binds, so a second sidecar on the same path would silently
displace the first.  This module therefore checks the path first, under a lock on its directory.  A
path is never taken from a running sidecar, and always from a dead one.

gRPC does not expose the peer credentials of a unix socket.  Operators therefore connect to a proxy
socket.  It reads their credentials from the kernel (SO_PEERCRED) and forwards the bytes to a gRPC
server for operators only.  Each connection is forwarded from an abstract address of its own, by
which a call finds its peer.

No other process can connect to that inner server.  Its socket file is unlinked as soon as it is
bound, and the proxy reaches it through a descriptor of this process.  Engines and readers have
another server, which grants no operator's rights.
"""

import asyncio
import errno
import fcntl
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import structlog

from controller.core.errors import SpeculationError
from controller.util import tasks
from controller.util.sockets import operators_path

# Modes of the engines' socket, the operators' socket, and their directories.
_ENGINES_MODE = 0o660
_OPERATORS_MODE = 0o600
_DIRECTORY_MODE = 0o750
_INNER_DIRECTORY_MODE = 0o700
# sockaddr_un.sun_path, less its closing zero.
_PATH_BYTES_MAX = 107
_PROBE_SECONDS = 1.0
_CHUNK_BYTES = 65_536
_CONNECTIONS_MAX = 32
_PEER_CREDENTIALS = struct.Struct("3i")

_log = structlog.get_logger(__name__)


class SocketTakenError(SpeculationError):
    """The path cannot be bound: a server listens there, or it is not a socket."""


def open_directory(path: Path) -> int:
    """Opens the directory of a socket, which is made if necessary; returns its descriptor.

    Raises SocketTakenError.
    """
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        return os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SocketTakenError(
            f"the directory of {path} cannot be used: {error.strerror}; choose another socket with "
            "--address unix:PATH"
        ) from error


@contextmanager
def claim_path(path: Path, mode: int = _ENGINES_MODE) -> Iterator[None]:
    """Frees a path, so that a socket with this mode can be bound to it inside the block.

    Raises SocketTakenError.
    """
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise SocketTakenError(f"{path}: a socket's path has at most {_PATH_BYTES_MAX} bytes")
    directory = open_directory(path)
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
    """Removes the socket, or the link to one, that a dead sidecar has left.

    Raises SocketTakenError if a server listens on it, or if it is not a socket.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            mode = path.stat().st_mode
    except FileNotFoundError:
        # The path does not exist, or is a dangling link.
        path.unlink(missing_ok=True)
        return
    except OSError as error:
        # The link leads to itself, or to a place that this process may not read.
        raise SocketTakenError(f"{path} cannot be checked: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise SocketTakenError(f"{path} is not a socket: remove it or choose another path")
    if _is_served(path):
        raise SocketTakenError(
            f"another sidecar is serving on {path}: stop it, or choose another socket with "
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
            # Only a running server has a full backlog.  After other errors this sidecar does not
            # claim the path.
            if error.errno in {errno.EAGAIN, errno.ETIMEDOUT} or isinstance(error, TimeoutError):
                return True
            raise SocketTakenError(f"{path} cannot be checked: {error.strerror}") from error
    return True


def is_same_file(path: Path, inode: int) -> bool:
    """Returns whether the socket file is still the one that was bound."""
    try:
        return path.lstat().st_ino == inode
    except OSError:
        return False


def remove_same_file(path: Path, inode: int) -> None:
    """Removes the socket file, unless another one has replaced it."""
    if is_same_file(path, inode):
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes a connected process.  pid: 0 if it is in another pid namespace."""

    uid: int
    gid: int
    pid: int
    command: str

    def __str__(self) -> str:
        """Names the peer for the audit."""
        process = f", pid {self.pid}" if self.pid else ""
        command = f" ({self.command})" if self.command else ""
        return f"uid {self.uid}, gid {self.gid}{process}{command}"


class OperatorSocket:
    """Serves operators on a separate socket.

    engines_path: path of the engines' socket.  directory: that of the operators' socket; None: the
    same as the engines'.  With another directory, a link next to the engines' socket leads to it,
    so that every command finds it by one rule.  An engine without access to the directory cannot
    follow the link.

    The operators' gRPC server has to be bound inside `bind_inner_socket` before `open`.
    """

    def __init__(self, engines_path: Path, directory: Path | None = None) -> None:
        default_path = operators_path(engines_path)
        self.path = default_path if directory is None else directory / default_path.name
        self._link = None if self.path.absolute() == default_path.absolute() else default_path
        self._engines_path = engines_path
        # Every file that was created, and its inode.
        self._created_inodes: dict[Path, int] = {}
        # Descriptor of the inner socket's file, which has been unlinked.
        self._inner_descriptor: int | None = None
        self._peers: dict[str, Peer] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Returns the connected peers by gRPC's name of the connection."""
        return MappingProxyType(self._peers)

    @contextmanager
    def bind_inner_socket(self) -> Iterator[Path]:
        """Yields the path to which the operators' gRPC server must be bound inside the block.

        The engines' socket must be bound inside the block too.  Raises OSError.
        """
        os.close(open_directory(self.path))
        # The directory is the operators': a process that may write to it could replace the socket.
        with tempfile.TemporaryDirectory(prefix=".", dir=self.path.parent) as folder:
            # The umask of `claim_path` has removed the right to enter it.
            Path(folder).chmod(_INNER_DIRECTORY_MODE)
            inner_path = Path(folder, "s")
            yield inner_path
            self._inner_descriptor = os.open(inner_path, os.O_PATH)
            inner_path.unlink()
        self._created_inodes[self._engines_path] = self._engines_path.lstat().st_ino

    @property
    def missing_files_reason(self) -> str:
        """Names the socket files that were removed, and the consequence; "" if all exist."""
        created = self._created_inodes.items()
        missing = [str(path) for path, inode in created if not is_same_file(path, inode)]
        if not missing:
            return ""
        return (
            f"{', '.join(missing)}: removed; connected clients stay connected, and others cannot "
            "find "
            "this sidecar: restart it"
        )

    async def open(self) -> None:
        """Begins to accept operators.  Raises SocketTakenError."""
        if self._link is not None:
            # Before the socket exists: an old link could lead to it.
            remove_if_dead(self._link)
        with claim_path(self.path, _OPERATORS_MODE):
            self._server = await asyncio.start_unix_server(self._accept, self.path)
            self._created_inodes[self.path] = self.path.lstat().st_ino
        if self._link is not None:
            try:
                self._link.symlink_to(self.path.absolute())
            except OSError as error:
                raise SocketTakenError(
                    f"{self._link} cannot be created: {error.strerror}"
                ) from error
            self._created_inodes[self._link] = self._link.lstat().st_ino

    async def close(self) -> None:
        """Ends all connections and removes the socket files that still belong to this sidecar."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for path, inode in self._created_inodes.items():
            remove_same_file(path, inode)
        self._created_inodes.clear()
        await tasks.cancel_tasks(self._connections)
        if self._inner_descriptor is not None:
            os.close(self._inner_descriptor)
            self._inner_descriptor = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _CONNECTIONS_MAX:
            _log.warning("operator_refused", detail=f"{_CONNECTIONS_MAX} operators are connected")
            writer.close()
            return
        self._connections.add(task)
        try:
            peer = _peer_of(writer.get_extra_info("socket"))
            await self._serve(peer, reader, writer)
        except OSError as error:
            _log.debug("operator_lost", error=str(error))
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(
        self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name = f"speculation-operator-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as inner_socket:
            inner_socket.setblocking(False)  # noqa: FBT003  # the library's own
            inner_socket.bind(f"\0{name}")
            await asyncio.get_running_loop().sock_connect(
                inner_socket, f"/proc/self/fd/{self._inner_descriptor}"
            )
            inner_reader, inner_writer = await asyncio.open_connection(sock=inner_socket)
            self._peers[f"unix-abstract:{name}"] = peer
            try:
                pumps = {
                    asyncio.create_task(_pump(reader, inner_writer)),
                    asyncio.create_task(_pump(inner_reader, writer)),
                }
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await tasks.cancel_tasks(pumps)
            finally:
                # First this: the name can be used by another connection once it is free.
                del self._peers[f"unix-abstract:{name}"]
                inner_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _peer_of(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, gid = _PEER_CREDENTIALS.unpack(raw)
    command = ""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        command = text if text.isprintable() else ""
    return Peer(uid, gid, pid, command)
