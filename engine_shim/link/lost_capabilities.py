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
_MAX_LOST_CAPABILITIES: Final = 512
MAX_LOST_CAPABILITY_BYTES: Final = 1024


def make_lost_capability(
    capability: Capability.ValueType,
    reason: str,
    drafter: str = "",
    gammas: Sequence[int] = (),
) -> LostCapability:
    """Makes a lost capability with the current time.

    reason: is cut, and converted to one line of printable characters.
    """
    one_line_reason = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return LostCapability(
        capability=capability,
        drafter=drafter,
        gammas=gammas,
        reason=one_line_reason[:MAX_REASON_CHARACTERS],
        lost_at_unix_seconds=time.time(),
    )


def error_reason(error: BaseException) -> str:
    """Formats an error as the reason of a lost capability."""
    return f"{type(error).__name__}: {error}"


class LostCapabilities:
    """Keeps, in the agent, all lost capabilities that the engine has reported, each once."""

    def __init__(self) -> None:
        self._by_content: dict[bytes, LostCapability] = {}

    def __len__(self) -> int:
        return len(self._by_content)

    @property
    def all(self) -> list[LostCapability]:
        """Returns the lost capabilities in the order in which they were reported."""
        return list(self._by_content.values())

    def add(self, lost_capability: LostCapability) -> None:
        """Adds a lost capability.  Raises PacketError if it is too large or one too many."""
        content = lost_capability.SerializeToString(deterministic=True)
        if len(content) > MAX_LOST_CAPABILITY_BYTES:
            raise PacketError(
                f"a lost capability of {len(content)} bytes, limit {MAX_LOST_CAPABILITY_BYTES}"
            )
        if content not in self._by_content and len(self._by_content) >= _MAX_LOST_CAPABILITIES:
            raise PacketError(f"more than {_MAX_LOST_CAPABILITIES} lost capabilities")
        self._by_content[content] = lost_capability
