"""Starts CPU engines as forks of one process that has imported SGLang.

Each then starts in seconds instead of half a minute, and they share most of their memory.  Nothing
else of an engine differs.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lab.cpu_engine.environment import cpu_engine_env
from lab.harness.fork_server import ForkClient, ForkedProcess, ForkServer

_ENGINE = [sys.executable, "-m", "lab.cpu_engine.serve"]
# Names the descriptors of fork servers' control sockets, and after a colon the variables of SGLang
# that a server was started with beside this process's own: "7 9:SGLANG_SIMULATE_ACC_LEN=1".
DESCRIPTOR = "FORK_SERVER_DESCRIPTOR"
PRELOAD = "lab.cpu_engine.engine_imports"
# By the variables that SGLang reads while it is imported.
_servers: dict[frozenset[tuple[str, str]], ForkClient] = {}


def popen(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **options: Any
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Starts a command as `subprocess.Popen` does, and a CPU engine as a fork."""
    if list(command[:3]) != _ENGINE:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    env = cpu_engine_env(env)
    key = _key(env)
    if key not in _servers:
        descriptor = _descriptors().get(key)
        _servers[key] = (
            ForkServer(PRELOAD, env)
            if descriptor is None
            else ForkClient(socket.socket(fileno=descriptor))
        )
    return _servers[key].start(command[2], command[3:], env, Path.cwd(), stdout.fileno())


def _descriptors() -> dict[frozenset[tuple[str, str]], int]:
    found = {}
    for word in os.environ.get(DESCRIPTOR, "").split():
        descriptor, _, variables = word.partition(":")
        more = dict(one.split("=", 1) for one in variables.split(",") if one)
        found[_key(cpu_engine_env() | more)] = int(descriptor)
    return found


def _key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if item[0].startswith("SGLANG_"))
