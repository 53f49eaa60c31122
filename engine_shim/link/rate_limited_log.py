"""Limits the rate of log events that could occur in every step."""

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Final

import structlog

_EVERY_SECONDS: Final = 10.0


class RateLimitedLog:
    """Logs each event at most once every 10 s; the next line contains the number left out."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._log = structlog.get_logger("engine_shim.link.agent")
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def info(self, event: str, **fields: object) -> None:
        """Logs a normal event."""
        self._line("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Logs an event that the operator should look at."""
        self._line("warning", event, fields)

    def _line(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._clock()
        if now < self._next.get(event, now):
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._next[event] = now + _EVERY_SECONDS
        left_out = self._left_out.pop(event, 0)
        if left_out:
            fields = {**fields, "left_out": left_out}
        # The agent keeps running if stderr (inherited from the engine) is broken.
        with contextlib.suppress(OSError):
            getattr(self._log, level)(event, **fields)
