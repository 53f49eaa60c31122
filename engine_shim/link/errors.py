"""Errors of the link.  None of them is ever raised into an engine's step."""


class LinkError(Exception):
    """Base of every error that the link raises on purpose."""


class PacketError(LinkError):
    """Bytes that are not the packet they should be.  Nothing of them is used."""


class LinkSettingsError(LinkError):
    """A SPECULATION_* variable that is unknown or has an impossible value."""


class LinkStartError(LinkError):
    """The link refuses to start: what it was given contradicts itself, or no agent can be run."""


class UnusablePlanError(LinkError):
    """A plan that asks for what this engine did not introduce, or that is not a table."""
