"""Errors of a shim, and how one ends a process.

All of them are raised while the engine starts, none in a step.
"""

from __future__ import annotations

from collections.abc import Callable


class PluginError(RuntimeError):
    """The engine must not start: the message says what was wrong and what to do.

    A RuntimeError, because engines end their server on any Exception of the scheduler's process.
    """


class UnsupportedEngineError(PluginError):
    """A configuration (or a version of the engine) that the shim cannot steer."""


class HookError(PluginError):
    """Something that the shim relies on did not take, or is not where it should be."""


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
