"""Waiting for another process, up to a deadline; a test never sleeps to be right."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], *, within: float = 20.0, what: str = "") -> T:
    """The first true value of `condition`; fails when none came `within` so many seconds."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what or condition}")
        time.sleep(0.002)
    return value
