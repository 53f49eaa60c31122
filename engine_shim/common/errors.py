"""Errors of a shim.  All of them are raised while the engine starts, none in a step."""


class PluginError(RuntimeError):
    """The engine must not start: the message says what was wrong and what to do.

    A RuntimeError, because engines end their server on any Exception of the scheduler's process.
    """


class UnsupportedEngineError(PluginError):
    """A configuration (or a version of the engine) that the shim cannot steer."""


class HookError(PluginError):
    """Something that the shim relies on did not take, or is not where it should be."""
