"""Reports to the sidecar the capabilities that an engine has lost.

The engine keeps every lost capability for as long as it runs.  It retries each one until the socket
accepts it, and sends all of them to every new agent.  The agent keeps them as well: it lists them
in every introduction, and sends new ones on an open stream.  So neither a dropped packet nor a
restart of the agent or of the sidecar can lose one.
"""

import time
from collections.abc import Sequence
from typing import Final

from engine_shim.link.errors import PacketError
from speculation.v1.engine_pb2 import Capability, LostCapability

MAX_REASON_CHARACTERS: Final = 200
# More than the draft lengths and capabilities of any engine.
_MOST_LOSSES: Final = 512
MAX_LOSS_BYTES: Final = 1024


def lost(
    capability: Capability.ValueType,
    reason: str,
    drafter: str = "",
    gammas: Sequence[int] = (),
) -> LostCapability:
    """Makes a lost capability with the current time.

    reason: is cut, and converted to one line of printable characters.
    """
    words = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return LostCapability(
        capability=capability,
        drafter=drafter,
        gammas=gammas,
        reason=words[:MAX_REASON_CHARACTERS],
        lost_at_unix_seconds=time.time(),
    )


def reason_of(error: BaseException) -> str:
    """Formats an error as the reason of a lost capability."""
    return f"{type(error).__name__}: {error}"


class KnownLosses:
    """Keeps, in the agent, all lost capabilities that the engine has reported, each once."""

    def __init__(self) -> None:
        self._known: dict[bytes, LostCapability] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def all(self) -> list[LostCapability]:
        """Returns the lost capabilities in the order in which they were reported."""
        return list(self._known.values())

    def take(self, loss: LostCapability) -> None:
        """Adds a lost capability.  Raises PacketError if it is too large or one too many."""
        content = loss.SerializeToString(deterministic=True)
        if len(content) > MAX_LOSS_BYTES:
            raise PacketError(f"a lost capability of {len(content)} bytes, limit {MAX_LOSS_BYTES}")
        if content not in self._known and len(self._known) >= _MOST_LOSSES:
            raise PacketError(f"more than {_MOST_LOSSES} lost capabilities")
        self._known[content] = loss
