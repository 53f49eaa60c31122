"""Decides whether a drafter can learn online in this engine, and starts that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.learning.online_updates import OnlineUpdates
from engine_shim.sglang.learning.online_weights import OnlineWeights
from engine_shim.sglang.learning.student import live_drafter

if TYPE_CHECKING:
    from engine_shim.link.orders import Orders
    from engine_shim.sglang.api.ranks import Peers
    from engine_shim.sglang.api.settings import PluginSettings

_REFUSED: Final = "SPECULATION_ONLINE_UPDATES is set, but the drafter cannot learn"


def refused_device(device: str, *, several: bool) -> str:
    """Explains why drafters cannot learn on a device; "" if they can.  several: ranks share it."""
    if device not in ("cpu", "cuda"):
        return f"{_REFUSED}: on {device} this is untested"
    if several and device != "cpu":
        return (
            f"{_REFUSED}: several ranks exchange weights over the host's network, for which the "
            f"engine would wait on {device}"
        )
    return ""


def updates_for(
    worker: Any,
    device: str,
    ranks: Peers,
    settings: PluginSettings,
    orders: Orders,
    second: Any = None,
) -> OnlineUpdates | OnlineWeights:
    """Makes the updates of this `EAGLEWorkerV2`, or what rank 0's change on another rank.

    device, ranks: that it runs on, and that share it.  orders: of this rank.  second: the
    `DFlashDrafter` beside the engine's own, if that learns.  Raises UnsupportedEngineError, and
    UnsupportedDrafterError for a drafter that has no student.
    """
    reason = refused_device(device, several=ranks.several)
    if reason:
        raise UnsupportedEngineError(reason)
    drafter = live_drafter(worker, ranks, second)
    if ranks.rank:
        weights = OnlineWeights(drafter, per_request=settings.online_scope == "request")
        weights.follow(orders)
        return weights
    return OnlineUpdates(drafter, settings, settings.gammas[-1], orders)
