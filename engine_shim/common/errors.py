"""Errors of a shim, and the function that ends the process with one.

They are raised only while the engine starts, never in a step.
"""

from __future__ import annotations

from collections.abc import Callable


class PluginError(RuntimeError):
    """The engine must not start; the message says what is wrong and what to do.

    A RuntimeError, because engines end their server on any Exception of the scheduler's process.
    """


class UnsupportedEngineError(PluginError):
    """A configuration (or a version of the engine) that the shim cannot steer."""


class HookError(PluginError):
    """A hook did not take effect, or a name that the shim uses does not exist."""


def register_or_exit(register: Callable[[], None]) -> None:
    """Runs a plugin's registration.  Raises SystemExit with the message of any error.

    Engines log some errors of a plugin and start without it.  An engine that looks steered but is
    not must not start.
    """
    try:
        register()
    except Exception as error:
        raise SystemExit(
            f"speculation-controller: the engine does not start: {type(error).__name__}: {error}"
        ) from error
