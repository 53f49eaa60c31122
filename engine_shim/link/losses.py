"""Carries to the sidecar what an engine can no longer do.

The engine keeps every loss for as long as it runs and sends each one again until the socket takes
it, and all of them to every new agent.  The agent keeps them as well: it names them in every
introduction, and on an open stream as soon as there are more.  So no dropped packet, and no restart
of the agent or of the sidecar, can make a loss be forgotten.
"""

import time
from collections.abc import Sequence
from typing import Final

from engine_shim.link.errors import PacketError
from speculation.v1.engine_pb2 import Capability, LostCapability

MAX_REASON_CHARACTERS: Final = 200
# An engine has fewer draft lengths and capabilities than that.
_MOST_LOSSES: Final = 512
MAX_LOSS_BYTES: Final = 1024


def lost(
    capability: Capability.ValueType,
    reason: str,
    drafter: str = "",
    gammas: Sequence[int] = (),
) -> LostCapability:
    """A loss that happens now.  reason: cut and brought into one line of printable characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return LostCapability(
        capability=capability,
        drafter=drafter,
        gammas=gammas,
        reason=words[:MAX_REASON_CHARACTERS],
        lost_at_unix_seconds=time.time(),
    )


def reason_of(error: BaseException) -> str:
    """An error as a reason."""
    return f"{type(error).__name__}: {error}"


class KnownLosses:
    """The agent's end: all losses that the engine has reported, each once."""

    def __init__(self) -> None:
        self._known: dict[bytes, LostCapability] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def all(self) -> list[LostCapability]:
        """Returns the losses in the order in which they came."""
        return list(self._known.values())

    def take(self, loss: LostCapability) -> None:
        """Takes in a loss.  Raises PacketError for one too many, and one that is too large."""
        content = loss.SerializeToString(deterministic=True)
        if len(content) > MAX_LOSS_BYTES:
            raise PacketError(f"a loss of {len(content)} bytes, limit {MAX_LOSS_BYTES}")
        if content not in self._known and len(self._known) >= _MOST_LOSSES:
            raise PacketError(f"more than {_MOST_LOSSES} losses")
        self._known[content] = loss
