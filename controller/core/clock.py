"""Passes time in as a value: wall time in production, virtual time in tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Returns seconds since an arbitrary fixed point; they never decrease."""


class WallClock:
    """Reads the machine's monotonic clock."""

    def now(self) -> float:
        """Returns the seconds of `time.monotonic`."""
        return time.monotonic()


class VirtualClock:
    """Moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Returns the virtual seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.  Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
