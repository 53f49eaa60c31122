"""Lets streams decide in turn, so that reports need not wait for all decisions that are due."""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic


class DecisionTurns:
    """One decision at a time.

    A decision takes as long as a dozen reports.  After each one the event loop is left to reports
    for as long as the decision took, so that decisions take half of it at most.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_free = True

    def ask(self, decide: Callable[[], None]) -> None:
        """Calls `decide`, which must not raise, when it is its turn: now if nobody has one."""
        self._waiting.append(decide)
        if self._is_free:
            self._next()

    def _next(self) -> None:
        self._is_free = not self._waiting
        if self._is_free:
            return
        began = monotonic()
        self._waiting.popleft()()
        asyncio.get_running_loop().call_later(monotonic() - began, self._next)
