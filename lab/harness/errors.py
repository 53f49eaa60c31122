"""The errors of a run; their texts are meant for the person who started it."""


class HarnessError(Exception):
    """The run cannot continue; the message says why and where to look."""


class EngineFailedError(HarnessError):
    """An engine, or the sidecar, did not start, died, or lost a request."""


class LostRequestError(EngineFailedError):
    """The connection to an engine broke, or timed out, before the whole answer had arrived."""
