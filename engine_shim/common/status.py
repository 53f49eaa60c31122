"""Says how an engine is steered: the link's state, who decides, and what it has lost.

The state is in plain values, for the engine's own interfaces.  Who decides (the sidecar, its last
plan, or the safe default) is logged.  What the engine can no longer do is kept, logged once, and
reported to the sidecar.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from math import isfinite
from typing import Any

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.losses import lost
from engine_shim.link.plan_follower import Source
from speculation.v1.engine_pb2 import Capability, LostCapability

_log = logging.getLogger(__name__)


def link_status(link: EngineLink | None) -> dict[str, Any]:
    """Returns every field of `LinkStatus`; nothing without a link.

    An enum by its name; None for what JSON has no number for; anything else as it is.
    """
    fields = {} if link is None else asdict(link.status())
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return None if isinstance(value, float) and not isfinite(value) else value


def log_source(old: Source, new: Source) -> None:
    """Writes a line about a source of choices that has changed."""
    if new is Source.PLAN:
        _log.info("the sidecar steers (before: %s)", old.value)
    else:
        _log.warning("the sidecar does not steer: %s (before: %s)", new.value, old.value)


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
