"""Counts what the parts of a check do, prices it before anything runs, and watches the time."""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from lab.gpu_check import acceptance, engines, small_engines
from lab.gpu_check.engines import SHAPE_ENGINES
from lab.gpu_check.load import warm_up_loads
from lab.gpu_check.shapes import Device, Load, Scale, Shape
from lab.harness.errors import HarnessError
from lab.harness.load_generator import StreamPhase

PRICE_FILE = Path(__file__).parent / "prices.json"
Arm = tuple[str, int]


class OutOfTimeError(HarnessError):
    """The remaining budget is too short for the next step of a part."""


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of what takes time.

    launches: engines started.  captures: CUDA graphs.  passes: decode steps.  requests: prompts
    sent.  wait_seconds: waits of a fixed length, as a cost profile is.
    """

    launches: int = 0
    captures: int = 0
    passes: int = 0
    requests: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: Self) -> "Work":
        """Adds the counts."""
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def multiply(self, count: int) -> "Work":
        """Returns the work of doing this `count` times."""
        return Work(*(getattr(self, f.name) * count for f in fields(Work)))


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of one engine start without its captures, one capture, one decode step, one prompt.

    source: where the numbers are from.
    """

    launch: float
    capture: float
    decode_pass: float
    request: float
    source: str

    @classmethod
    def read(cls, path: Path = PRICE_FILE) -> "Prices":
        """Reads the price list.  Raises HarnessError for any other file."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise HarnessError(f"{path} is not a price list: {error}") from error

    def as_json(self) -> dict[str, Any]:
        """Returns the prices as the file has them."""
        return asdict(self)

    def seconds(self, work: Work) -> float:
        """Returns the seconds that the work takes."""
        return (
            work.launches * self.launch
            + work.captures * self.capture
            + work.passes * self.decode_pass
            + work.requests * self.request
            + work.wait_seconds
        )


class Deadline:
    """The end of a check; `seconds` after it is made.  clock: gives monotonic seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the check began."""
        return self._clock() - self._start

    @property
    def remaining_seconds(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._seconds - self.elapsed

    def require(self, seconds: float, activity: str) -> None:
        """Raises OutOfTimeError if fewer seconds are left.  activity: takes them, for the text."""
        if self.remaining_seconds < seconds:
            raise OutOfTimeError(
                f"{activity} takes about {seconds:.0f} s, and "
                f"{max(self.remaining_seconds, 0.0):.0f} s are left"
            )


class Tally:
    """Counts what a check has really done, and how long it took, for the next price list."""

    def __init__(self) -> None:
        self.launches = self.captures = self.passes = self.requests = 0
        self.launch_seconds = self.capture_seconds = self.play_seconds = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns counts and seconds."""
        return {name: round(value, 3) for name, value in vars(self).items()}

    def prices(self, source: str, request_seconds: float) -> Prices | None:
        """Makes a price list; None if the check did too little to price everything.

        request_seconds: the price of a prompt, which cannot be separated from a play's passes.
        """
        if not (self.launches and self.captures and self.passes):
            return None
        decoding = max(self.play_seconds - self.requests * request_seconds, 0.0)
        return Prices(
            launch=round(max(self.launch_seconds - self.capture_seconds, 0.0) / self.launches, 2),
            capture=round(self.capture_seconds / self.captures, 4),
            decode_pass=round(decoding / self.passes, 5),
            request=request_seconds,
            source=source,
        )


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The counts of one part and their price in seconds."""

    name: str
    work: Work
    seconds: float


class Planner:
    """Counts, as `Check` does: engines that run already are not started again.

    graph_sizes: () for those of shape and scale.
    """

    def __init__(
        self,
        shape: Shape,
        scale: Scale,
        device: Device,
        graph_sizes: tuple[int, ...] = (),
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.device = device
        self.graph_sizes = graph_sizes or scale.batch_sizes(shape)
        self.has_profile = False
        self._running: tuple[str, ...] = ()

    def count_starts(self, *policies: str) -> Work:
        """Counts the starts of these engines, except those that run; all others are stopped."""
        work = Work()
        for engine_name in policies:
            if engine_name in self._running:
                continue
            work += Work(launches=1, captures=self.count_captures(engine_name))
            if engine_name in SHAPE_ENGINES:
                work += self.play(warm_up_loads(self.shape))
        self._running = policies
        return work

    def count_captures(self, engine_name: str) -> int:
        """Counts the CUDA graphs of an engine."""
        if engine_name in small_engines.SMALL_ENGINES:
            return small_engines.count_captures(engine_name, self.device)
        return engines.count_captures(engine_name, self.shape, self.graph_sizes)

    def play(
        self,
        loads: Iterable[Load | StreamPhase],
        arm: Arm | None = None,
        tokens_a_step: float = 0.0,
    ) -> Work:
        """Counts one play of loads, or of a stream.

        arm: that runs, None for plain decoding.  tokens_a_step: instead of what the arm gives.
        """
        gain = tokens_a_step or (1.0 if arm is None else self.tokens_a_step(arm))
        work = Work()
        for load in map(_as_load, loads):
            tokens = load.requests * load.new_tokens / load.concurrency
            work += Work(passes=math.ceil(tokens / gain), requests=load.requests)
        return work

    def tokens_a_step(self, arm: Arm) -> float:
        """Returns the tokens that a sequence gains in a step of an arm, by the assumed curve."""
        drafter, gamma = arm
        probability = acceptance.ASSUMED[drafter]
        return float(sum(probability**k for k in range(gamma + 1)))


def _as_load(load: Load | StreamPhase) -> Load:
    """Returns a phase as a load of equal requests, without their prompts."""
    if isinstance(load, Load):
        return load
    requests = len(load.requests)
    return Load(load.concurrency, requests, 0, math.ceil(load.new_tokens / requests))


def plan(
    parts: Iterable[tuple[str, Callable[[Planner], Work]]], planner: Planner, prices: Prices
) -> list[PlannedPart]:
    """Counts and prices parts in the order in which they will run.

    parts: name, and the function that counts.
    """
    planned = []
    for name, count in parts:
        work = count(planner)
        planned.append(PlannedPart(name, work, prices.seconds(work)))
    return planned


def total_seconds(planned: Iterable[PlannedPart]) -> float:
    """Adds the seconds."""
    return sum(part.seconds for part in planned)
