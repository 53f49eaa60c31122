"""The operators' socket: who calls is known by the kernel's word, not by the caller's.

gRPC does not tell who is behind a unix socket.  Operators therefore connect to a socket of our
own, which asks the kernel (SO_PEERCRED) and passes the bytes on to a gRPC server for operators
only, from an address that stands for this very connection; by that address a call finds its peer.

Nobody else can connect to that server, so an impostor has no address to use: the name
of its socket is removed as soon as it is bound, and the only way to it that is left is a descriptor
of this process.  Engines and readers have another server, which knows no operators.
"""

import asyncio
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import structlog

from controller.service.net import unix_socket
from controller.service.net.unix_socket import SocketTakenError
from controller.util import tasks
from controller.util.sockets import operators_path

_MODE = 0o600
_INNER_DIRECTORY_MODE = 0o700
_CHUNK = 65_536
_CONNECTIONS = 32
_CREDENTIALS = struct.Struct("3i")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as the kernel knows it.  pid: 0 when it is in another pid namespace."""

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
    """Serves operators on a socket of their own.

    engines: path of the engines' socket.  directory: where this one lies; None: beside that one.
    Elsewhere, a link beside the engines' socket leads to it, so that every command finds it by one
    rule; an engine that does not have the directory cannot follow it.

    The operators' gRPC server has to be bound inside `binding` before `open`.
    """

    def __init__(self, engines: Path, directory: Path | None = None) -> None:
        beside = operators_path(engines)
        self.path = beside if directory is None else directory / beside.name
        self._link = None if self.path.absolute() == beside.absolute() else beside
        self._main = engines
        # Every file that was made, and its inode.
        self._made: dict[Path, int] = {}
        # The inner socket's file, which has no name any more.
        self._inner: int | None = None
        self._peers: dict[str, Peer] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Returns who is connected now, by gRPC's name of the connection."""
        return MappingProxyType(self._peers)

    @contextmanager
    def binding(self) -> Iterator[Path]:
        """Gives the path that the operators' gRPC server has to be bound to inside the block.

        The sidecar's own socket has to be bound inside it, too.  Raises OSError.
        """
        os.close(unix_socket.opened_directory(self.path))
        # Where only operators come: whoever may write there could exchange the inner socket.
        with tempfile.TemporaryDirectory(prefix=".", dir=self.path.parent) as folder:
            # The umask of `unix_socket.claimed` takes the right to enter it away.
            Path(folder).chmod(_INNER_DIRECTORY_MODE)
            inner = Path(folder, "s")
            yield inner
            self._inner = os.open(inner, os.O_PATH)
            inner.unlink()
        self._made[self._main] = self._main.lstat().st_ino

    @property
    def lost(self) -> str:
        """Names the socket files that have gone, and the consequence; "" if all exist."""
        made = self._made.items()
        gone = [str(path) for path, inode in made if not unix_socket.is_own(path, inode)]
        if not gone:
            return ""
        return (
            f"{', '.join(gone)}: removed; who is connected stays so, nobody else finds this "
            "sidecar: start it again"
        )

    async def open(self) -> None:
        """Lets operators in.  Raises SocketTakenError."""
        if self._link is not None:
            # Before the socket is there, which a link that was left behind would lead to.
            unix_socket.remove_if_dead(self._link)
        with unix_socket.claimed(self.path, _MODE):
            self._server = await asyncio.start_unix_server(self._enter, self.path)
            self._made[self.path] = self.path.lstat().st_ino
        if self._link is not None:
            try:
                self._link.symlink_to(self.path.absolute())
            except OSError as error:
                raise SocketTakenError(f"{self._link} cannot be made: {error.strerror}") from error
            self._made[self._link] = self._link.lstat().st_ino

    async def close(self) -> None:
        """Ends all connections and removes the socket files that are still this sidecar's."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for path, inode in self._made.items():
            unix_socket.remove_own(path, inode)
        self._made.clear()
        await tasks.end(self._connections)
        if self._inner is not None:
            os.close(self._inner)
            self._inner = None

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _CONNECTIONS:
            _log.warning("operator_refused", detail=f"{_CONNECTIONS} operators are connected")
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
        with socket.socket(socket.AF_UNIX) as link:
            link.setblocking(False)  # noqa: FBT003  # the library's own
            link.bind(f"\0{name}")
            await asyncio.get_running_loop().sock_connect(link, f"/proc/self/fd/{self._inner}")
            inner_reader, inner_writer = await asyncio.open_connection(sock=link)
            self._peers[f"unix-abstract:{name}"] = peer
            try:
                ways = {
                    asyncio.create_task(_pump(reader, inner_writer)),
                    asyncio.create_task(_pump(inner_reader, writer)),
                }
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await tasks.end(ways)
            finally:
                # First this: nobody else may come under the name once it is free.
                del self._peers[f"unix-abstract:{name}"]
                inner_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _peer_of(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    command = ""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        command = text if text.isprintable() else ""
    return Peer(uid, gid, pid, command)
