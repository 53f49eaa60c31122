"""Looks for engines on this host that name the sidecar and have no agent: nobody steers them.

An engine whose plugins were loaded before `SPECULATION_SIDECAR` was set, or not at all (embedded in
another program, or spawned by one), runs as if nothing had been asked for.  Processes of other
containers are not visible, and say nothing here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.doctor.finding import Finding, warn

_VARIABLE = "SPECULATION_SIDECAR"
_AGENT = "engine_shim.link.agent"
# Words of a command line that a finding has.
_WORDS = 4


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    command: tuple[str, ...]


def check_processes(address: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields a warning for each tree of processes that names the sidecar and has no agent.

    address: the sidecar's, as an engine names it.  proc: the kernel's file system of processes.
    """
    found = _naming(address, proc)
    steered: set[int] = set()
    for process in [p for p in found.values() if _AGENT in p.command]:
        steered.add(_root(process.parent, found))
    for pid, process in sorted(found.items()):
        if process.parent in found or pid in steered or _AGENT in process.command:
            continue
        if not any("sglang" in word or "vllm" in word for word in _words(pid, found)):
            continue
        command = " ".join(process.command[:_WORDS])
        yield warn(
            f"process {pid}",
            f"{command}: it names the sidecar and has no agent: it is still starting, or it runs "
            "unsteered, because its plugins were not loaded, or before the variable was set",
            "wait for its start to end; in a program of your own, set SPECULATION_SIDECAR before "
            "anything of the engine is imported, and load its plugins before its arguments exist",
        )


def _naming(address: str, proc: Path) -> dict[int, _Process]:
    wanted = f"{_VARIABLE}={address}".encode()
    found: dict[int, _Process] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            # The name of the program, in brackets, may hold anything.
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
            parent = int(state.split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended, or is another user's
        found[int(folder.name)] = _Process(parent, tuple(command.rstrip("\0").split("\0")))
    return found


def _root(pid: int, found: dict[int, _Process]) -> int:
    while pid in found and found[pid].parent in found:
        pid = found[pid].parent
    return pid


def _words(root: int, found: dict[int, _Process]) -> Iterator[str]:
    """The command lines of a tree."""
    for pid, process in found.items():
        if _root(pid, found) == root:
            yield from process.command
