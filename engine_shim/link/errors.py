"""Errors of the link.  None of them is raised into an engine's step."""


class LinkError(Exception):
    """Base class of the link's errors."""


class PacketError(LinkError):
    """A packet that is malformed or too large; it is discarded as a whole."""


class LinkSettingsError(LinkError):
    """A SPECULATION_* variable that is unknown or has an invalid value."""


class LinkStartError(LinkError):
    """The link cannot start: its arguments are inconsistent, or no agent can be started."""


class UnusablePlanError(LinkError):
    """A plan with a malformed table, or with a choice that this engine did not introduce."""
