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

from lab.cpu_engine.environment import EMULATION, cpu_engine_env, emulated_cuda_env
from lab.harness.fork_server import ForkClient, ForkedProcess, ForkServer

# Names the descriptors of fork servers' control sockets, and after a colon the variables of SGLang
# that a server was started with beside this process's own: "7 9:SGLANG_SIMULATE_ACC_LEN=1".
# EMULATED_CUDA=1 among them names one for emulated GPUs.
DESCRIPTOR = "FORK_SERVER_DESCRIPTOR"
PRELOAD = "lab.cpu_engine.engine_imports"
# Makes the environment of each module that serves.
_ENVIRONMENTS = {
    "lab.cpu_engine.serve": cpu_engine_env,
    "lab.cpu_engine.serve_emulated_cuda": emulated_cuda_env,
}
_Key = frozenset[tuple[str, str]]
# By the variables that the modules read while they are imported.
_servers: dict[_Key, ForkClient] = {}


def popen(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **options: Any
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Starts a command as `subprocess.Popen` does, and a CPU engine as a fork."""
    *python, module = command[:3]
    if python != [sys.executable, "-m"] or module not in _ENVIRONMENTS:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    env = _ENVIRONMENTS[module](env)
    key = _key(env)
    if key not in _servers:
        descriptor = _descriptors().get(key)
        _servers[key] = (
            ForkServer(PRELOAD, env)
            if descriptor is None
            else ForkClient(socket.socket(fileno=descriptor))
        )
    return _servers[key].start(module, command[3:], env, Path.cwd(), stdout.fileno())


def _descriptors() -> dict[_Key, int]:
    descriptors = {}
    for word in os.environ.get(DESCRIPTOR, "").split():
        descriptor, _, variables = word.partition(":")
        engine_variables = dict(
            assignment.split("=", 1) for assignment in variables.split(",") if assignment
        )
        environment = emulated_cuda_env if EMULATION in engine_variables else cpu_engine_env
        descriptors[_key(environment() | engine_variables)] = int(descriptor)
    return descriptors


def _key(environment: Mapping[str, str]) -> _Key:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith("SGLANG_") or name == EMULATION
    )
