"""Defines what can keep a peer out of a comparison."""

from controller.core.errors import SpeculationError


class PeerUnavailableError(SpeculationError):
    """A peer whose own package is needed and cannot be imported.  `peer` is its name."""

    def __init__(self, peer: str, fault: str, remedy: str) -> None:
        self.peer = peer
        super().__init__(f"peer {peer!r} is not available: {fault}; {remedy}")
