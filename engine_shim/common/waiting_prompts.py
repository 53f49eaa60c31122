"""Counts the waiting prompt tokens for a step's report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

# A queue of unchanged length is counted again after this many steps, because one request may have
# replaced another.
_STEPS_PER_COUNT: Final = 64
# Requests that may be counted in a step, on average, as the length of a queue changes.
_REQUESTS_PER_STEP: Final = 64


class WaitingPrompts:
    """Counts the prompt tokens of requests that wait for their first pass.

    queue: returns the waiting requests.  tokens: returns the prompt tokens of a request, 0 if it
    has had its first pass.  A long queue is not counted in every step, to save the engine's time.
    """

    def __init__(self, queue: Callable[[], Collection[Any]], tokens: Callable[[Any], int]) -> None:
        self._queue = queue
        self._tokens = tokens
        self._length = self._count = 0
        self._steps = _STEPS_PER_COUNT

    def count(self) -> int:
        """Returns the number of waiting prompt tokens; call it at the end of each step."""
        queue = self._queue()
        length = len(queue)
        self._steps += 1
        pause = _STEPS_PER_COUNT
        if length != self._length:
            pause = min(pause, length // _REQUESTS_PER_STEP)
        if self._steps >= pause:
            self._length, self._steps = length, 0
            self._count = sum(map(self._tokens, queue))
        return self._count
