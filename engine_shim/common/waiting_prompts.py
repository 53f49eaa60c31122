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

    waiting_requests: returns the waiting requests.  prompt_tokens: returns the prompt tokens of a
    request, 0 if it has had its first pass.  A long queue is not counted in every step, to save the
    engine's time.
    """

    def __init__(
        self, waiting_requests: Callable[[], Collection[Any]], prompt_tokens: Callable[[Any], int]
    ) -> None:
        self._waiting_requests = waiting_requests
        self._prompt_tokens = prompt_tokens
        self._last_queue_length = self._last_count = 0
        self._steps_since_count = _STEPS_PER_COUNT

    def count(self) -> int:
        """Returns the number of waiting prompt tokens; call it at the end of each step."""
        queue = self._waiting_requests()
        queue_length = len(queue)
        self._steps_since_count += 1
        steps_between_counts = _STEPS_PER_COUNT
        if queue_length != self._last_queue_length:
            steps_between_counts = min(steps_between_counts, queue_length // _REQUESTS_PER_STEP)
        if self._steps_since_count >= steps_between_counts:
            self._last_queue_length, self._steps_since_count = queue_length, 0
            self._last_count = sum(map(self._prompt_tokens, queue))
        return self._last_count
