"""Looks for engines on this host that name the sidecar and have no agent: nobody steers them.

An engine whose plugins were loaded before `SPECULATION_SIDECAR` was set, or not at all (embedded in
another program, or spawned by one), runs as if nothing had been asked for.  Processes of other
containers are not visible, and say nothing here.

Engines give their processes titles, which overwrites what the kernel shows of a command line and of
its environment: such a process still links its agent to the process that started it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.doctor.finding import Finding, warn

_VARIABLE = "SPECULATION_SIDECAR"
_AGENT = "engine_shim.link.agent"
# One of these is in a word of an engine's command line, or in its title.
_ENGINES = ("sglang", "vllm", "VLLM")
# Words of a command line that a finding has.
_WORDS = 4


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    command: tuple[str, ...]
    names_sidecar: bool


def check_processes(address: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields a warning for each tree of processes that names the sidecar and has no agent.

    address: the sidecar's, as an engine names it.  proc: the kernel's file system of processes.
    """
    found = _all(address, proc)
    trees: dict[int, list[_Process]] = {}
    for pid, process in found.items():
        root = _root(pid, found)
        if root is not None:
            trees.setdefault(root, []).append(process)
    for root, tree in sorted(trees.items()):
        words = [word for process in tree for word in process.command]
        if _AGENT in words or not any(engine in word for word in words for engine in _ENGINES):
            continue
        command = " ".join(found[root].command[:_WORDS])
        yield warn(
            f"process {root}",
            f"{command}: it names the sidecar and has no agent: it is still starting, or it runs "
            "unsteered, because its plugins were not loaded, or before the variable was set",
            "wait for its start to end; in a program of your own, set SPECULATION_SIDECAR before "
            "anything of the engine is imported, and load its plugins before its arguments exist",
        )


def _all(address: str, proc: Path) -> dict[int, _Process]:
    wanted = f"{_VARIABLE}={address}".encode()
    found: dict[int, _Process] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            # The name of the program, in brackets, may hold anything.
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
            parent = int(state.split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended
        words = tuple(command.rstrip("\0").split("\0"))
        found[int(folder.name)] = _Process(parent, words, _has(wanted, folder / "environ"))
    return found


def _has(variable: bytes, environment: Path) -> bool:
    try:
        return variable in environment.read_bytes().split(b"\0")
    except OSError:
        return False  # it is another user's, or may not be looked into


def _root(pid: int, found: dict[int, _Process]) -> int | None:
    """The uppermost of a process and those above it that names the sidecar; None if none does."""
    root = None
    seen: set[int] = set()
    while pid in found and pid not in seen:  # numbers that are used again may form a circle
        seen.add(pid)
        if found[pid].names_sidecar:
            root = pid
        pid = found[pid].parent
    return root
