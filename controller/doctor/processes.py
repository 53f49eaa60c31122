"""Checks the processes on this host, and those that are connected to the engines' socket.

Engines that name the sidecar and have no agent are not steered.  An engine whose plugins were
loaded before `SPECULATION_SIDECAR` was set, or not at all (embedded in another program, or spawned
by one), runs as if the variable were unset.  Processes of other containers are not visible here.

Engines set process titles, which overwrite the command line and environment that the kernel shows.
Such a process still connects its agent to the process that started it.

Of the processes that are connected to the engines' socket, those of root and of the sidecar's user
can also open the operators' socket next to it.  In this container that is intended.  In another
container it is an engine that shares the directory of the sockets.  The kernel names the user of
every connection in this network namespace, which all containers of a pod share (NETLINK_SOCK_DIAG,
as used by `ss -x`).
"""

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controller.doctor.finding import Finding, ok, warn
from controller.util.sockets import operators_path

_VARIABLE = "SPECULATION_SIDECAR"
_AGENT = "engine_shim.link.agent"
# The command line or the title of an engine has one of these in a word.
_ENGINES = ("sglang", "vllm", "VLLM")
# Words of a command line that a finding shows.
_ARGUMENTS_SHOWN = 4
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
# The kernel answers at once; a sandbox without such sockets may not.
_ANSWER_SECONDS = 2.0
_ROOT_USER = 0


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    command: tuple[str, ...]
    names_sidecar: bool


def check_processes(address: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields a warning for each tree of processes that names the sidecar and has no agent.

    address: the sidecar's, as an engine names it.  proc: the kernel's file system of processes.
    """
    processes = _list_processes(address, proc)
    trees: dict[int, list[_Process]] = {}
    for pid, process in processes.items():
        root = _tree_root(pid, processes)
        if root is not None:
            trees.setdefault(root, []).append(process)
    for root, tree in sorted(trees.items()):
        arguments = [argument for process in tree for argument in process.command]
        if _AGENT in arguments or not any(
            engine in argument for argument in arguments for engine in _ENGINES
        ):
            continue
        command = " ".join(processes[root].command[:_ARGUMENTS_SHOWN])
        yield warn(
            f"process {root}",
            f"{command}: names the sidecar but has no agent: it is still starting, or it runs "
            "unsteered because its plugins were not loaded, or were loaded before the variable was "
            "set",
            "wait until it has started; in your own program, set SPECULATION_SIDECAR before "
            "importing the engine, and load the engine's plugins before creating its arguments",
        )


def _list_processes(address: str, proc: Path) -> dict[int, _Process]:
    assignment = f"{_VARIABLE}={address}".encode()
    processes: dict[int, _Process] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            # The program's name, in parentheses, may contain any character.
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
            parent = int(state.split()[1])
        except (OSError, IndexError, ValueError):
            continue  # the process has ended
        arguments = tuple(command.rstrip("\0").split("\0"))
        processes[int(folder.name)] = _Process(
            parent, arguments, _has_variable(assignment, folder / "environ")
        )
    return processes


def _has_variable(variable: bytes, environment: Path) -> bool:
    try:
        return variable in environment.read_bytes().split(b"\0")
    except OSError:
        return False  # of another user, or not readable


def _tree_root(pid: int, processes: dict[int, _Process]) -> int | None:
    """Returns the topmost of a process and its ancestors that names the sidecar, if any does."""
    root = None
    visited: set[int] = set()
    while pid in processes and pid not in visited:  # reused process ids may form a cycle
        visited.add(pid)
        if processes[pid].names_sidecar:
            root = pid
        pid = processes[pid].parent
    return root


@dataclass(frozen=True, slots=True)
class _Socket:
    """One end of a connection, or a listener.

    file: inode of the path that it is bound to.  peer: inode of the other end.  Both are 0 if it
    has none.
    """

    file: int
    peer: int
    uid: int


def check_callers(engines: Path, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields the path of the operators' socket, or a warning if an engine can open it.

    engines: path of the engines' socket.  proc: the kernel's file system of processes.  Yields
    nothing if the sockets cannot be read, or the kernel does not list connections.
    """
    operators = Path(os.path.realpath(operators_path(engines)))
    try:
        engines_inode, owner = engines.stat().st_ino, operators.stat().st_uid
        if operators.parent != Path(os.path.realpath(engines.parent)):
            yield ok("operators", f"{operators}: outside the directory that engines share")
            return
        sockets = _unix_sockets()
    except OSError:
        return
    callers = {
        unix_socket.peer for unix_socket in sockets.values() if unix_socket.file == engines_inode
    } & sockets.keys()
    elsewhere = callers - _socket_inodes(proc)
    users = sorted({sockets[inode].uid for inode in elsewhere} & {_ROOT_USER, owner})
    if not users:
        yield ok("operators", f"{operators}: no process of another container can open it")
        return
    user_names = " and ".join("root" if uid == _ROOT_USER else f"uid {uid}" for uid in users)
    yield warn(
        "operators",
        f"a process of {user_names} in another container is connected to {engines}: it can also "
        "open "
        f"{operators} in the same directory, and act as an operator",
        "set operators_directory to a directory that the engine does not mount, or run the engine "
        "as another user",
    )


def _unix_sockets() -> Mapping[int, _Socket]:
    """Returns every unix socket of this network namespace, by inode.  Raises OSError."""
    sockets: dict[int, _Socket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        show = _SHOW_VFS | _SHOW_PEER | _SHOW_UID
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL, 0, show, _ALL, _ALL)
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            answer = kernel.recv(_READ_BYTES)
            for kind, body in _netlink_parts(answer, _HEADER):
                if kind == _NLMSG_DONE:
                    return sockets
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not list unix sockets")
                inode = _MESSAGE.unpack_from(body)[4]
                values = {
                    number: _NUMBER.unpack_from(value)[0]
                    for number, value in _netlink_parts(body[_MESSAGE.size :], _ATTRIBUTE)
                    if len(value) >= _NUMBER.size
                }
                sockets[inode] = _Socket(
                    values.get(_UNIX_DIAG_VFS, 0),
                    values.get(_UNIX_DIAG_PEER, 0),
                    # A kernel before 5.3 does not name users.
                    values.get(_UNIX_DIAG_UID, _ALL),
                )


def _netlink_parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yields the type and body of each netlink message or attribute; length and type come first."""
    start = 0
    while start + header.size <= len(data):
        length, kind = header.unpack_from(data, start)[:2]
        if length < header.size:
            return
        yield kind, data[start + header.size : start + length]
        start += -(-length // 4) * 4


def _socket_inodes(proc: Path) -> set[int]:
    """Returns the inodes of the sockets of all processes that this user may inspect."""
    inodes = set()
    for folder in proc.glob("[0-9]*/fd"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for descriptor in folder.iterdir():
                with suppress(OSError):
                    kind, _, number = str(descriptor.readlink()).partition(":[")
                    if kind == "socket":
                        inodes.add(int(number.rstrip("]")))
    return inodes
