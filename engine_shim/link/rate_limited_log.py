"""Limits the rate of log events that could occur in every step."""

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Final

import structlog

_INTERVAL_SECONDS: Final = 10.0


class RateLimitedLog:
    """Logs each event at most once every 10 s; the next line contains the number left out."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._log = structlog.get_logger("engine_shim.link.agent")
        self._next_log_time: dict[str, float] = {}
        self._suppressed_count: dict[str, int] = {}

    def info(self, event: str, **fields: object) -> None:
        """Logs a normal event."""
        self._log_limited("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Logs an event that the operator should look at."""
        self._log_limited("warning", event, fields)

    def _log_limited(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._clock()
        if now < self._next_log_time.get(event, now):
            self._suppressed_count[event] = self._suppressed_count.get(event, 0) + 1
            return
        self._next_log_time[event] = now + _INTERVAL_SECONDS
        suppressed = self._suppressed_count.pop(event, 0)
        if suppressed:
            fields = {**fields, "left_out": suppressed}
        # The agent keeps running if stderr (inherited from the engine) is broken.
        with contextlib.suppress(OSError):
            getattr(self._log, level)(event, **fields)
