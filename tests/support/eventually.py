"""Waiting for another process, up to a deadline; a test never sleeps to be right.

The deadline only ends a hang: an agent gives way to all others, so that its start can take half a
minute on a busy machine.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None], *, timeout_seconds: float = 120.0, description: str = ""
) -> T:
    """Returns the first true value of `condition`; fails after `timeout_seconds`."""
    start_time = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - start_time
        if waited > timeout_seconds:
            raise AssertionError(f"not within {timeout_seconds} s: {description or condition}")
        # Asking costs what is waited for some of the processor.
        time.sleep(min(0.002 + 0.02 * waited, 0.05))
    return value
