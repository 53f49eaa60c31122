"""Runs a command of the lab whose CPU engines are forks of one that has imported SGLang.

    python -m tests.support.forking_lab lab.demo --quick

Each engine then starts in seconds instead of half a minute.  Nothing else of the command differs.
`tests.support.engine.run_lab` starts it with the fork server of the tests.
"""

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lab.cpu_engine.environment import cpu_engine_env
from lab.harness import processes
from tests.support.fork_server import ForkClient, ForkedProcess, ForkServer

_ENGINE = [sys.executable, "-m", "lab.cpu_engine.serve"]
_popen = subprocess.Popen
# Names the descriptor of a fork server's control socket, for engines with the usual variables.
DESCRIPTOR = "FORK_SERVER_DESCRIPTOR"
# By the variables that SGLang reads while it is imported.
_servers: dict[frozenset[tuple[str, str]], ForkClient] = {}


def _key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if item[0].startswith("SGLANG_"))


def _start(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **options: Any
) -> "subprocess.Popen[bytes] | ForkedProcess":
    if list(command[:3]) != _ENGINE:
        return _popen(command, env=env, stdout=stdout, **options)
    env = cpu_engine_env(env)
    key = _key(env)
    if key not in _servers:
        _servers[key] = ForkServer("tests.support.engine_imports", env)
    return _servers[key].start(command[2], command[3:], env, Path.cwd(), stdout.fileno())


class _Subprocess:
    """The module `subprocess`, as the harness of the lab sees it."""

    Popen = staticmethod(_start)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def main() -> None:
    """Runs the module that the first argument names with the arguments after it."""
    vars(processes)["subprocess"] = _Subprocess()
    if descriptor := os.environ.pop(DESCRIPTOR, ""):
        _servers[_key(cpu_engine_env())] = ForkClient(socket.socket(fileno=int(descriptor)))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
