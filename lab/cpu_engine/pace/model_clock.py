"""The clock of paced passes: that of the machine, which can be made to stand still.

Where passes are not held, it moves by their prices alone, and the machine runs as fast as it can.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# The last moments of a wait are spent awake, because a sleep ends late.
_AWAKE_SECONDS = 2e-4


class ModelClock:
    """Tells the time of the passes, in seconds of the machine.

    real_time: it is `perf_counter`, less the time for which it stood still.  Otherwise it begins at
    0 and stands still but for `wait_until`, which moves it without waiting.
    """

    def __init__(self, *, real_time: bool = True) -> None:
        self._is_real_time = real_time
        self._paused_seconds = 0.0
        self._now = 0.0

    def now(self) -> float:
        """Returns the time."""
        return time.perf_counter() - self._paused_seconds if self._is_real_time else self._now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stands still for as long as the context lasts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    def wait_until(self, due: float) -> float:
        """Waits until `due`; returns the time, which is later if `due` has passed already."""
        if not self._is_real_time:
            self._now = max(self._now, due)
            return self._now
        remaining_seconds = due - self.now()
        if remaining_seconds > _AWAKE_SECONDS:
            time.sleep(remaining_seconds - _AWAKE_SECONDS)
        while (now := self.now()) < due:
            pass
        return now
