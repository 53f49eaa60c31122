"""What each process holds, looked at every few seconds: memory, descriptors, threads, sockets, log.

A process that is started again begins a series of its own.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from lab.harness.background_thread import BackgroundThread

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Watched:
    """pid: of the process, None while there is none.  log: what it writes to, if anything."""

    pid: Callable[[], int | None]
    log: Callable[[], Path] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process.  seconds: since the start; log_bytes: None without a log."""

    seconds: float
    name: str
    pid: int
    memory_megabytes: float
    descriptors: int
    threads: int
    sockets: int
    log_bytes: int | None


class Sampler(BackgroundThread):
    """Samples on a thread while the context is open.  every: seconds."""

    def __init__(self, watched: Mapping[str, Watched], every: float) -> None:
        super().__init__("sampler")
        self._watched = watched
        self._every = every
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return super().__enter__()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            for name, watched in self._watched.items():
                pid = watched.pid()
                if pid is None:
                    continue
                try:
                    self.samples.append(self._sample(name, pid, watched.log))
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue  # it ended meanwhile

    def _sample(self, name: str, pid: int, log: Callable[[], Path] | None) -> Sample:
        process = psutil.Process(pid)
        descriptors = [_target(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        return Sample(
            time.monotonic() - self._began,
            name,
            pid,
            process.memory_info().rss / MEGABYTE,
            len(descriptors),
            process.num_threads(),
            sum(target.startswith("socket:") for target in descriptors),
            None if log is None else log().stat().st_size,
        )


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile


def child_named(pid: int, text: str) -> Callable[[], int | None]:
    """The descendant of a process whose title or command has this text."""
    found: list[psutil.Process] = []

    def look() -> int | None:
        if not (found and found[0].is_running()):
            found.clear()
            try:
                children = psutil.Process(pid).children(recursive=True)
            except psutil.NoSuchProcess:
                return None
            for child in children:
                try:
                    if text in " ".join(child.cmdline()):
                        found.append(child)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
        return found[0].pid if found else None

    return look
