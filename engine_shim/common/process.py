"""Names an engine, its processor and its model revision; registers functions for its exit."""

from __future__ import annotations

import atexit
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path


def default_engine_id(server: int | str) -> str:
    """Returns `<host name>:<server>`: stable across restarts, and different for each server.

    server: the port that it serves on, or another name of the contract's characters.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host[:100]}:{server}"


def processor_name() -> str:
    """Returns the processor's model name from /proc/cpuinfo, "cpu" if it is missing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def hub_revision(model: str, revision: str | None) -> str:
    """Returns the revision of a model on a hub; "" for a local folder, which has none."""
    return "" if Path(model).is_dir() else revision or ""


def register_exit_handler(close: Callable[[], None]) -> None:
    """Calls `close` when the interpreter of this process ends, but not of a forked child.

    A forked child inherits the registered functions, and would end the agent or the trainer of the
    engine.
    """
    engine_pid = os.getpid()

    def close_in_engine_process() -> None:
        if os.getpid() == engine_pid:
            close()

    atexit.register(close_in_engine_process)
