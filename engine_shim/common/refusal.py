"""Ends a process in which the shim cannot work."""

from __future__ import annotations

from collections.abc import Callable


def register_or_exit(register: Callable[[], None]) -> None:
    """Runs a plugin's registration.  Raises SystemExit with the reason of any error.

    Engines log some errors of a plugin and start without it; one that looks steered and is not must
    not start.
    """
    try:
        register()
    except Exception as error:
        raise SystemExit(
            f"speculation-controller: the engine does not start: {type(error).__name__}: {error}"
        ) from error
