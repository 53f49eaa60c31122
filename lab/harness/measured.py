"""Records how a result was measured: the machine, its other load, and the spread of repeats.

Other programs that keep cores busy make a measurement doubtful.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil

from controller.util.files import write_atomically

_PACKAGES = (
    "speculation-controller", "speculation-controller-shim", "sglang", "torch", "grpcio",
    "protobuf", "numpy",
)  # fmt: skip

# Cores that other processes may use before a figure measured meanwhile is called doubtful.
DOUBTFUL_CORES = 0.25


def run_facts() -> dict[str, Any]:
    """The command line, the machine and the versions, as every result file has them."""
    command = [Path(sys.executable).name, *sys.orig_argv[1:]]
    return {"command": command, "machine": machine(), "versions": versions()}


def write_result(document: Mapping[str, Any], folder: Path) -> None:
    """Writes `result.json` into a folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "result.json", (json.dumps(document, indent=1) + "\n").encode())


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
    package_versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            package_versions[package] = "not installed"
    return package_versions


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


class ForeignLoad:
    """Mean cores busy with anything but this process and its children, while the context is open.

    cores: known after the context has ended.
    """

    def __init__(self) -> None:
        self.cores = 0.0
        self._start_uptime = self._own_before = self._busy_before = 0.0

    def __enter__(self) -> Self:
        self._start_uptime, self._busy_before, self._own_before = (
            _uptime(),
            _busy_seconds(),
            _process_tree_seconds(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        elapsed = _uptime() - self._start_uptime
        foreign = (_busy_seconds() - self._busy_before) - (
            _process_tree_seconds() - self._own_before
        )
        self.cores = max(foreign, 0.0) / elapsed if elapsed > 0 else 0.0


def _uptime() -> float:
    return float(sum(psutil.cpu_times())) / (psutil.cpu_count() or 1)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - getattr(times, "guest", 0.0))


def _process_tree_seconds() -> float:
    process = psutil.Process()
    cpu_times = process.cpu_times()
    # What has ended is counted by its parent: here by this process, else by a child still running.
    total = cpu_times.user + cpu_times.system + cpu_times.children_user + cpu_times.children_system
    for child in process.children(recursive=True):
        try:
            cpu_times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += cpu_times.user + cpu_times.system
    return float(total)


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one figure, one for each repeat, in order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    def ratio_to(self, other: Self) -> Self:
        """These values divided by those of another figure, repeat by repeat."""
        pairs = zip(self.values, other.values, strict=True)
        return type(self)(tuple(value / divisor for value, divisor in pairs))

    def text(self, digits: int = 2, separator: str = " to ") -> str:
        """The median with the lowest and the highest value, for a table."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({low}{separator}{high})"

    def as_json(self) -> dict[str, Any]:
        """The spread as it stands in a result file."""
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "repeats": [round(value, 4) for value in self.values],
        }
