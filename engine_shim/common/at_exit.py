"""Ends what an engine has started when the engine ends, and not when a fork of it does."""

import atexit
import os
from collections.abc import Callable


def at_exit(close: Callable[[], None]) -> None:
    """Calls `close` when the interpreter of this very process ends.

    A process that is forked from this one inherits what is registered, and would end the agent or
    the trainer of the engine.
    """
    engine = os.getpid()

    def close_own() -> None:
        if os.getpid() == engine:
            close()

    atexit.register(close_own)
