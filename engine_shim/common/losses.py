"""Keeps what this engine can no longer do, logs it once, and reports it to the sidecar."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine_shim.link.losses import lost
from speculation.v1.engine_pb2 import Capability

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink
    from speculation.v1.engine_pb2 import LostCapability

_log = logging.getLogger(__name__)


class Losses:
    """Keeps one engine's losses, on the scheduler's thread only.

    link: reports them; None on ranks without one and before the introduction, which has its own
    list of losses.  known: losses that the introduction reports to the sidecar.
    """

    def __init__(
        self, link: EngineLink | None = None, known: Iterable[LostCapability] = ()
    ) -> None:
        self._lost = {(loss.capability, loss.drafter): loss for loss in known}
        self._link = link

    @property
    def all(self) -> list[LostCapability]:
        """Returns the losses in the order in which they came."""
        return list(self._lost.values())

    def lose(self, capability: Capability.ValueType, reason: str, drafter: str = "") -> None:
        """The engine cannot do this until it starts again; only the first time counts."""
        if (capability, drafter) in self._lost:
            return
        loss = self._lost[capability, drafter] = lost(capability, reason, drafter)
        what = drafter or Capability.Name(capability).removeprefix("CAPABILITY_").lower()
        _log.error("this engine has lost %s and tells the sidecar so: %s", what, loss.reason)
        if self._link is not None:
            self._link.lose(loss)

    def status(self) -> list[dict[str, object]]:
        """Every loss in plain values."""
        return [
            {
                "capability": Capability.Name(loss.capability),
                "drafter": loss.drafter,
                "reason": loss.reason,
                "lost_at_unix_seconds": loss.lost_at_unix_seconds,
            }
            for loss in self._lost.values()
        ]
