"""Measures how many cores other programs keep busy, which makes a measurement doubtful."""

from typing import Self

import psutil

# Cores that others may use before a figure measured meanwhile is called doubtful.
DOUBTFUL_CORES = 0.25


class ForeignLoad:
    """Mean cores busy with anything but this process and its children, while the context is open.

    cores: known after the context has ended.
    """

    def __init__(self) -> None:
        self.cores = 0.0
        self._began = self._ours = self._all = 0.0

    def __enter__(self) -> Self:
        self._began, self._all, self._ours = _uptime(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed = _uptime() - self._began
        foreign = (_busy_seconds() - self._all) - (_own_seconds() - self._ours)
        self.cores = max(foreign, 0.0) / elapsed if elapsed > 0 else 0.0


def _uptime() -> float:
    return float(sum(psutil.cpu_times())) / (psutil.cpu_count() or 1)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - getattr(times, "guest", 0.0))


def _own_seconds() -> float:
    me = psutil.Process()
    spent = me.cpu_times()
    # What has ended is counted by its parent: here by this process, else by a child still running.
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for child in me.children(recursive=True):
        try:
            spent = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system
    return float(total)
