"""Names of an engine and of what it runs on."""

from __future__ import annotations

import re
import socket
from pathlib import Path


def default_engine_id(server: int | str) -> str:
    """Returns `<host name>:<server>`: stable across restarts, and different for each server.

    server: the port that it serves on, or another word of the contract's characters.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host[:100]}:{server}"


def processor_name() -> str:
    """Names the processor as the kernel does."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def revision_of(model: str, revision: str | None) -> str:
    """Returns the revision of a model on a hub; "" for a local folder, which has none."""
    return "" if Path(model).is_dir() else revision or ""
