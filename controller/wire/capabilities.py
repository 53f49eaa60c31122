"""Lost capabilities between values and proto, both ways."""

import time
from collections.abc import Sequence

from controller.core.capabilities import MAX_REASON_CHARACTERS, Capability, LostCapability
from controller.core.engine_spec import MAX_ARMS
from controller.core.errors import InvalidLossError
from controller.util.text import moment_text
from speculation.v1 import engine_pb2

# Every draft length and every capability, each for itself.
_LOSSES_MAX = MAX_ARMS + len(Capability)

_TO_PROTO = {
    Capability.DRAFTER: engine_pb2.CAPABILITY_DRAFTER,
    Capability.SLEEP: engine_pb2.CAPABILITY_SLEEP,
    Capability.UPDATE_ONLINE: engine_pb2.CAPABILITY_UPDATE_ONLINE,
    Capability.COLLECT: engine_pb2.CAPABILITY_COLLECT,
    Capability.TAKE_VERSIONS: engine_pb2.CAPABILITY_TAKE_VERSIONS,
    Capability.REPORT: engine_pb2.CAPABILITY_REPORT,
}
_FROM_PROTO = {value: capability for capability, value in _TO_PROTO.items()}


def lost_to_proto(loss: LostCapability) -> engine_pb2.LostCapability:
    """The loss as it was reported."""
    return engine_pb2.LostCapability(
        capability=_TO_PROTO[loss.capability],
        drafter=loss.drafter,
        gammas=loss.gammas,
        reason=loss.reason,
        lost_at_unix_seconds=loss.lost_at,
    )


def lost_from_proto(message: engine_pb2.LostCapability) -> LostCapability | None:
    """None for a capability that is not known here.  Raises InvalidLossError.

    The reason is cut and made printable.  A time in the future (clocks differ) becomes now.
    """
    capability = _FROM_PROTO.get(message.capability)
    if capability is None:
        return None
    words = "".join(c if c.isprintable() else " " for c in message.reason[:MAX_REASON_CHARACTERS])
    return LostCapability(
        capability,
        message.drafter,
        tuple(sorted(set(message.gammas))),
        words,
        min(message.lost_at_unix_seconds, time.time()),
    )


def all_lost_from_proto(
    messages: Sequence[engine_pb2.LostCapability],
) -> tuple[LostCapability, ...]:
    """Returns the losses that are known here.  Raises InvalidLossError, also for too many."""
    if len(messages) > _LOSSES_MAX:
        raise InvalidLossError(f"{len(messages)} losses are reported, {_LOSSES_MAX} at most")
    found = map(lost_from_proto, messages)
    return tuple(loss for loss in found if loss is not None)


def lost_text(message: engine_pb2.LostCapability) -> str:
    """One line for people: what was lost, since when, and why."""
    loss = lost_from_proto(message)
    if loss is None:
        return f"a capability that this version does not know: {message.reason}"
    return f"{loss.what} lost since {moment_text(loss.lost_at)}: {loss.reason}"
