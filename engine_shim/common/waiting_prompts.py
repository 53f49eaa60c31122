"""Counts the prompt tokens that wait, for a step's report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

# A queue of unchanged length is counted again after so many steps: one request may have replaced
# another.
_STEPS_PER_COUNT: Final = 64
# Requests that may be counted in a step, on average, as the length of a queue changes.
_REQUESTS_PER_STEP: Final = 64


class WaitingPrompts:
    """Counts the prompt tokens of requests that wait for their first pass.

    queue: returns the requests that wait now.  tokens: returns those of a request's prompt, 0 if it
    has had its first pass.  A long queue is not counted in each step, since the engine would wait.
    """

    def __init__(self, queue: Callable[[], Collection[Any]], tokens: Callable[[Any], int]) -> None:
        self._queue = queue
        self._tokens = tokens
        self._length = self._count = 0
        self._steps = _STEPS_PER_COUNT

    def count(self) -> int:
        """Returns the tokens, as the step ends."""
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
