"""Whether a process holds more and more: a robust slope over windows, against a stated tolerance.

The first quarter of a process's life, 10 s at least, is its warm-up and left out.  The rest is cut
into windows; of each its low tenth counts, since moving load comes and goes, and what leaks stays.
Growth is the Theil-Sen slope over the windows, times the time between the first and the last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from statistics import median
from typing import Final

import numpy as np

from tools.soak.sampling import Sample

_WARM_UP = 0.25
# A process that starts on a busy machine takes up to so many seconds, whatever its life.
_START_SECONDS = 10.0
_WINDOWS = 8
_LOW = 10
# A life with fewer samples after its warm-up says nothing.
_SAMPLES_MIN = 5 * _WINDOWS


@dataclass(frozen=True, slots=True)
class Tolerance:
    """step: what may come once, whenever (an allocator's arena, a buffer that found its size).

    per_hour: what may come again and again.
    """

    step: float
    per_hour: float

    def allowed(self, seconds: float) -> float:
        """In that time."""
        return self.step + self.per_hour * seconds / 3600


# Of each kind of process; "" for those not named.
#   memory: fragmentation, and caches of the interpreter and of SGLang (a radix tree over a cache
#   of fixed size).  What a day of the hourly rate comes to still fits each container's limit.
#   descriptors, threads, sockets: nothing may grow; the step is for a connection that is open at
#   the time, or a pool that gains a worker.  SGLang's HTTP server holds the clients' connections,
#   up to 16, and others that were hung up for a while.
#   log: sidecar and agent bound each kind of line to ten a minute (300 bytes each); SGLang is told
#   to write warnings only.
TOLERANCES: Final[dict[str, dict[str, Tolerance]]] = {
    "memory": {
        "": Tolerance(4.0, 4.0),
        "scheduler": Tolerance(24.0, 24.0),
        "server": Tolerance(16.0, 16.0),
        "sidecar": Tolerance(6.0, 4.0),
    },
    "descriptors": {"": Tolerance(3.0, 2.0), "server": Tolerance(24.0, 2.0)},
    "threads": {"": Tolerance(3.0, 2.0)},
    "sockets": {"": Tolerance(3.0, 2.0), "server": Tolerance(24.0, 2.0)},
    "log": {"": Tolerance(100e3, 1e6)},
}
UNITS: Final = {"memory": "MB", "descriptors": "", "threads": "", "sockets": "", "log": "bytes"}


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one kind of thing in one process's life.

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
        """At this rate."""
        return self.grown / self.seconds * 3600

    @property
    def is_too_much(self) -> bool:
        """Whether it is a finding."""
        return self.grown > self.allowed

    def __str__(self) -> str:
        """As a finding."""
        return (
            f"{self.name} (process {self.pid}): {self.kind} grew by {self.grown:.4g} "
            f"{UNITS[self.kind]} in {self.seconds:.0f} s ({self.first:.6g} to {self.last:.6g}), "
            f"{self.allowed:.4g} are allowed"
        )


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Of every process that lived long enough, each kind of thing."""
    found: list[Growth] = []
    lives = sorted(samples, key=lambda sample: (sample.name, sample.pid, sample.seconds))
    for (name, pid), life in groupby(lives, key=lambda sample: (sample.name, sample.pid)):
        found += _of_life(name, pid, list(life))
    return found


def _of_life(name: str, pid: int, life: list[Sample]) -> Iterable[Growth]:
    began, ended = life[0].seconds, life[-1].seconds
    warm_up = max(_WARM_UP * (ended - began), _START_SECONDS)
    warm = [sample for sample in life if sample.seconds >= began + warm_up]
    if len(warm) < _SAMPLES_MIN:
        return
    for kind, tolerances in TOLERANCES.items():
        values = [value for sample in warm if (value := _value(sample, kind)) is not None]
        if not values:
            continue
        times, lows = _windows([sample.seconds for sample in warm], values)
        seconds = times[-1] - times[0]
        tolerance = tolerances.get(name, tolerances[""])
        yield Growth(
            name, pid, kind, lows[0], lows[-1], theil_sen(times, lows) * seconds, seconds,
            tolerance.allowed(seconds),
        )  # fmt: skip


def _value(sample: Sample, kind: str) -> float | None:
    return {
        "memory": sample.memory_megabytes,
        "descriptors": sample.descriptors,
        "threads": sample.threads,
        "sockets": sample.sockets,
        "log": sample.log_bytes,
    }[kind]


def _windows(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Middle and low tenth of each window."""
    middles = [float(part.mean()) for part in np.array_split(times, _WINDOWS)]
    lows = [float(np.percentile(part, _LOW)) for part in np.array_split(values, _WINDOWS)]
    return middles, lows


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes between every two points."""
    pairs = combinations(zip(times, values, strict=True), 2)
    return median((b - a) / (t - s) for (s, a), (t, b) in pairs)
