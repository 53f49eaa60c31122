"""Judges whether what a process holds keeps growing: a robust slope, and its tolerance.

Every few seconds memory, descriptors, threads, sockets and log are sampled.  A process that is
started again begins a series of its own.

The first quarter of a process's life, 10 s at least, is its warm-up and left out.  The rest is cut
into windows; of each its low tenth counts, since moving load comes and goes, and what leaks stays.
Growth is the Theil-Sen slope over the windows, times the time between the first and the last.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from typing import Final, Self

import numpy as np
import psutil

from lab.harness.background_thread import BackgroundThread

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A watched process.  pid: None while it does not run.  log: its log file, if it has one."""

    pid: Callable[[], int | None]
    log: Callable[[], Path] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of one process.  seconds: since the start; log_bytes: None without a log."""

    seconds: float
    name: str
    pid: int
    memory_megabytes: float
    descriptors: int
    threads: int
    sockets: int
    log_bytes: int | None


class Sampler(BackgroundThread):
    """Samples on a thread while the context is open.  interval: seconds."""

    def __init__(self, watched: Mapping[str, WatchedProcess], interval: float) -> None:
        super().__init__("sampler")
        self._watched = watched
        self._interval = interval
        self._start = time.monotonic()
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return super().__enter__()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
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
            time.monotonic() - self._start,
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


def find_child(pid: int, text: str) -> Callable[[], int | None]:
    """The descendant of a process whose title or command has this text."""
    cached_processes: list[psutil.Process] = []

    def find_pid() -> int | None:
        if not (cached_processes and cached_processes[0].is_running()):
            cached_processes.clear()
            try:
                children = psutil.Process(pid).children(recursive=True)
            except psutil.NoSuchProcess:
                return None
            for child in children:
                try:
                    if text in " ".join(child.cmdline()):
                        cached_processes.append(child)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
        return cached_processes[0].pid if cached_processes else None

    return find_pid


_WARM_UP = 0.25
# The most seconds that a process needs to start on a busy machine.
_START_SECONDS = 10.0
_WINDOWS = 8
_LOW = 10
# A life with fewer samples after its warm-up is not judged.
_SAMPLES_MIN = 5 * _WINDOWS


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed growth.  step: once, at any time (an arena, a buffer that found its size).

    per_hour: in every hour.
    """

    step: float
    per_hour: float

    def allowed(self, seconds: float) -> float:
        """Returns the growth that is allowed in this time."""
        return self.step + self.per_hour * seconds / 3600


# By what a Sample holds, and of each kind of process; "" for those not named.
#   memory: fragmentation, and caches of the interpreter and of SGLang (a radix tree over a cache
#   of fixed size).  What a day of the hourly rate comes to still fits each container's limit.
#   descriptors, threads, sockets: nothing may grow; the step is for a connection that is open at
#   the time, or a pool that gains a worker.  SGLang's HTTP server holds the clients' connections,
#   up to 16, and others that were hung up for a while.
#   log: sidecar and agent bound each kind of line to ten a minute (300 bytes each); SGLang is set
#   to write warnings only.
TOLERANCES: Final[dict[str, dict[str, Tolerance]]] = {
    "memory_megabytes": {
        "": Tolerance(4.0, 4.0),
        "scheduler": Tolerance(24.0, 24.0),
        "server": Tolerance(16.0, 16.0),
        "sidecar": Tolerance(6.0, 4.0),
    },
    "descriptors": {"": Tolerance(3.0, 2.0), "server": Tolerance(24.0, 2.0)},
    "threads": {"": Tolerance(3.0, 2.0)},
    "sockets": {"": Tolerance(3.0, 2.0), "server": Tolerance(24.0, 2.0)},
    "log_bytes": {"": Tolerance(100e3, 1e6)},
}


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one quantity in one process's life.

    first, last: of its windows.  grown: by the slope, in `seconds`.  allowed: in that time.
    """

    name: str
    pid: int
    kind: str
    first: float
    last: float
    grown: float
    seconds: float
    allowed: float

    @property
    def per_hour(self) -> float:
        """Returns the growth per hour."""
        return self.grown / self.seconds * 3600

    @property
    def is_too_much(self) -> bool:
        """Whether it is a finding."""
        return self.grown > self.allowed

    def __str__(self) -> str:
        """Describes the growth as a finding."""
        return (
            f"{self.name} (process {self.pid}): {self.kind} grew by {self.grown:.4g} in "
            f"{self.seconds:.0f} s ({self.first:.6g} to {self.last:.6g}), {self.allowed:.4g} are "
            f"allowed"
        )


def lives(samples: Sequence[Sample]) -> Iterator[tuple[str, list[Sample]]]:
    """Yields for each process its name with its id, and its samples in order."""
    ordered = sorted(samples, key=lambda sample: (sample.name, sample.pid, sample.seconds))
    for (name, pid), life in groupby(ordered, key=lambda sample: (sample.name, sample.pid)):
        yield f"{name} {pid}", list(life)


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Returns the growth of each quantity of every process that lived long enough."""
    return [growth for _, life in lives(samples) for growth in _growths_of_life(life)]


def _growths_of_life(life: list[Sample]) -> Iterator[Growth]:
    name, pid = life[0].name, life[0].pid
    start, end = life[0].seconds, life[-1].seconds
    warm_up = max(_WARM_UP * (end - start), _START_SECONDS)
    warm = [sample for sample in life if sample.seconds >= start + warm_up]
    if len(warm) < _SAMPLES_MIN:
        return
    for kind, tolerances in TOLERANCES.items():
        values = [value for sample in warm if (value := getattr(sample, kind)) is not None]
        if not values:
            continue
        times, lows = _windows([sample.seconds for sample in warm], values)
        seconds = times[-1] - times[0]
        tolerance = tolerances.get(name, tolerances[""])
        yield Growth(
            name, pid, kind, lows[0], lows[-1], theil_sen(times, lows) * seconds, seconds,
            tolerance.allowed(seconds),
        )  # fmt: skip


def _windows(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Middle and low tenth of each window."""
    middles = [float(part.mean()) for part in np.array_split(times, _WINDOWS)]
    lows = [float(np.percentile(part, _LOW)) for part in np.array_split(values, _WINDOWS)]
    return middles, lows


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes between every two points."""
    pairs = combinations(zip(times, values, strict=True), 2)
    return median((b - a) / (t - s) for (s, a), (t, b) in pairs)
