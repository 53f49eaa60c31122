"""Waiting for another process, up to a deadline; a test never sleeps to be right.

The deadline only ends a hang: an agent gives way to all others, so that its start can take half a
minute on a busy machine.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], *, within: float = 120.0, what: str = "") -> T:
    """The first true value of `condition`; fails when none came `within` so many seconds."""
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited > within:
            raise AssertionError(f"not within {within} s: {what or condition}")
        # Asking costs what is waited for some of the processor.
        time.sleep(min(0.002 + 0.02 * waited, 0.05))
    return value
