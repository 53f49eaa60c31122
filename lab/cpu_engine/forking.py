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
# Names the descriptor of a fork server's control socket, for engines with the usual variables.
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
        descriptor = os.environ.get(DESCRIPTOR, "")
        _servers[key] = (
            ForkClient(socket.socket(fileno=int(descriptor)))
            if descriptor and key == _key(cpu_engine_env())
            else ForkServer(PRELOAD, env)
        )
    return _servers[key].start(command[2], command[3:], env, Path.cwd(), stdout.fileno())


def _key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if item[0].startswith("SGLANG_"))
