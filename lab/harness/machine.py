"""Describes where something was measured, and with what."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from controller.util.files import write_whole

_PACKAGES = (
    "speculation-controller", "speculation-controller-shim", "sglang", "torch", "grpcio",
    "protobuf", "numpy",
)  # fmt: skip


def run_facts() -> dict[str, Any]:
    """The command line, the machine and the versions, as every result file has them."""
    command = [Path(sys.executable).name, *sys.orig_argv[1:]]
    return {"command": command, "machine": machine(), "versions": versions()}


def write_result(document: Mapping[str, Any], folder: Path) -> None:
    """Writes `result.json` into a folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "result.json", (json.dumps(document, indent=1) + "\n").encode())


def machine() -> dict[str, Any]:
    """The processor, memory and GPUs, the system, and how busy it is."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus(),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def gpus() -> list[str]:
    """Name, memory and driver of each GPU that nvidia-smi lists; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
