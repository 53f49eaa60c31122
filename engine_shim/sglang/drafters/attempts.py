"""Runs the parts of a drafter's work until one of them fails, and no longer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from engine_shim.link.losses import reason_of
from engine_shim.sglang.api import ranks

Found = TypeVar("Found")

_log = logging.getLogger(__name__)


class Attempts:
    """Is the base of what an engine can do without.

    over: why it no longer works; "" while it does.
    """

    def __init__(self, end: str) -> None:
        """Takes what the log says when it ends."""
        self.over, self._end = "", end

    def attempt(self, part: Callable[[], Found]) -> Found | None:
        """Runs a part of the work; returns None once one has failed.

        After the first error nothing of it runs any more.  Raises the error where other ranks would
        continue with it.
        """
        if not self.over:
            try:
                return part()
            except Exception as error:
                if ranks.are_several():
                    raise
                self.over = reason_of(error)
                _log.exception("%s", self._end)
        return None
