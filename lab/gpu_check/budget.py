"""Counts what a part of the check does, prices it, and watches the time that is left."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from lab.harness.errors import HarnessError

PRICE_FILE = Path(__file__).parent / "prices.json"


class OutOfTimeError(HarnessError):
    """The budget ends before the next step of a part would."""


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

    def times(self, count: int) -> "Work":
        """Returns the work of doing this so many times."""
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
            raise HarnessError(f"{path} is no price list: {error}") from error

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
        self._began = clock()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the check began."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._seconds - self.elapsed

    def require(self, seconds: float, what: str) -> None:
        """Raises OutOfTimeError unless so many seconds are left."""
        if self.left < seconds:
            raise OutOfTimeError(
                f"{what} takes about {seconds:.0f} s, and {max(self.left, 0.0):.0f} s are left"
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
        """Makes a price list; None where too little was done to price everything.

        request_seconds: the price of a prompt, which plays do not show apart from their passes.
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
