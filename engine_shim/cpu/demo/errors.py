"""What can go wrong in the demo, said to a person."""


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


class EngineFailedError(DemoError):
    """An engine, or the sidecar, did not start, died, or lost a request."""
