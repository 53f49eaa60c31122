"""Looks for callers of the engines' socket who could open the operators' socket beside it.

Those are root, and the sidecar's own user.  Here that is nobody's mistake: such processes are the
operator's own.  In another container it is an engine that shares the directory of the sockets.

The kernel names the user of every connection of this network namespace, of which a pod has one
(NETLINK_SOCK_DIAG, as `ss -x` asks it).
"""

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controller.doctor.finding import Finding, ok, warn
from controller.util.socket_paths import operators_path

# From linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SHOW_VFS, _SHOW_PEER, _SHOW_UID = 2, 4, 64
_UNIX_DIAG_VFS, _UNIX_DIAG_PEER, _UNIX_DIAG_UID = 1, 2, 7
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, -, states, inode, show, cookie
_MESSAGE = struct.Struct("=BBBBIII")  # family, type, state, -, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_NUMBER = struct.Struct("=I")
_ALL = 0xFFFF_FFFF
_READ_BYTES = 1 << 17
# The kernel answers at once; a sandbox that has no such sockets may not.
_ANSWER_SECONDS = 2.0

_ROOT = 0


@dataclass(frozen=True, slots=True)
class _Socket:
    """Describes one end of a connection, or a listener.

    file: inode of the path that it is bound to.  peer: inode of the other end.  0: none.
    """

    file: int
    peer: int
    uid: int


def check_callers(engines: Path, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields where the operators' socket lies, and a warning if an engine may be an operator.

    engines: path of the engines' socket.  proc: the kernel's file system of processes.  Yields
    nothing where the sockets cannot be looked at, or the kernel does not say who is connected.
    """
    operators = Path(os.path.realpath(operators_path(engines)))
    try:
        file, owner = engines.stat().st_ino, operators.stat().st_uid
        if operators.parent != Path(os.path.realpath(engines.parent)):
            yield ok("operators", f"{operators}: not in the directory that engines share")
            return
        sockets = _unix_sockets()
    except OSError:
        return
    callers = {it.peer for it in sockets.values() if it.file == file} & sockets.keys()
    elsewhere = callers - _inodes(proc)
    users = sorted({sockets[inode].uid for inode in elsewhere} & {_ROOT, owner})
    if not users:
        yield ok("operators", f"{operators}: no process of another container may open it")
        return
    named = " and ".join("root" if uid == _ROOT else f"uid {uid}" for uid in users)
    yield warn(
        "operators",
        f"a process of {named}, not of this container, is connected to {engines}: it may open "
        f"{operators} in the same directory, and is an operator then",
        "name a directory that the engine does not mount with operators_directory, or give the "
        "engine another user",
    )


def _unix_sockets() -> Mapping[int, _Socket]:
    """Returns every unix socket of this network namespace, by inode.  Raises OSError."""
    found: dict[int, _Socket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        show = _SHOW_VFS | _SHOW_PEER | _SHOW_UID
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL, 0, show, _ALL, _ALL)
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            answer = kernel.recv(_READ_BYTES)
            for kind, body in _parts(answer, _HEADER):
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not list unix sockets")
                inode = _MESSAGE.unpack_from(body)[4]
                values = {
                    number: _NUMBER.unpack_from(value)[0]
                    for number, value in _parts(body[_MESSAGE.size :], _ATTRIBUTE)
                    if len(value) >= _NUMBER.size
                }
                found[inode] = _Socket(
                    values.get(_UNIX_DIAG_VFS, 0),
                    values.get(_UNIX_DIAG_PEER, 0),
                    # A kernel before 5.3 does not name users.
                    values.get(_UNIX_DIAG_UID, _ALL),
                )


def _parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yields the type and body of each netlink message or attribute; length and type come first."""
    start = 0
    while start + header.size <= len(data):
        length, kind = header.unpack_from(data, start)[:2]
        if length < header.size:
            return
        yield kind, data[start + header.size : start + length]
        start += -(-length // 4) * 4


def _inodes(proc: Path) -> set[int]:
    """Returns the sockets of the processes here that this user may look into."""
    found = set()
    for folder in proc.glob("[0-9]*/fd"):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in folder.iterdir():
                with suppress(OSError):
                    kind, _, rest = str(descriptor.readlink()).partition(":[")
                    if kind == "socket":
                        found.add(int(rest.rstrip("]")))
    return found
