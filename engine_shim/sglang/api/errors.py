"""Errors of the plugin.  All of them are raised while the engine starts, none in a step."""


class PluginError(RuntimeError):
    """The engine must not start: the message says what was wrong and what to do.

    A RuntimeError, because SGLang's scheduler process ends its server on any Exception.
    """


class UnsupportedEngineError(PluginError):
    """A configuration (or an SGLang version) that this plugin cannot steer."""


class HookError(PluginError):
    """Something that the plugin relies on did not take, or is not where it should be."""
