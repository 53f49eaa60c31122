"""Status of the link, log lines about the source of choices, and the engine's lost capabilities.

The status has plain values, for the engine's own interfaces.  A change of the source (the sidecar's
plan, its last plan, or the safe default) is logged.  A lost capability is kept, logged once, and
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
from engine_shim.link.lost_capabilities import make_lost_capability
from engine_shim.link.plan_follower import Source
from speculation.v1.engine_pb2 import Capability, LostCapability

_log = logging.getLogger(__name__)


def link_status(link: EngineLink | None) -> dict[str, Any]:
    """Returns every field of `LinkStatus`; an empty dict without a link.

    An enum becomes its name, an infinite or NaN number None; other values are unchanged.
    """
    fields = {} if link is None else asdict(link.status())
    return {name: _json_value(value) for name, value in fields.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return None if isinstance(value, float) and not isfinite(value) else value


def log_source_change(old: Source, new: Source) -> None:
    """Logs that the source of choices has changed."""
    if new is Source.PLAN:
        _log.info("the sidecar steers (before: %s)", old.value)
    else:
        _log.warning("the sidecar does not steer: %s (before: %s)", new.value, old.value)


class LostCapabilityReporter:
    """Keeps and reports an engine's lost capabilities, on the scheduler's thread only.

    link: reports them; None on ranks without a link, and before the introduction, which has its own
    list.  introduced: lost capabilities that the introduction reports to the sidecar.
    """

    def __init__(
        self, link: EngineLink | None = None, introduced: Iterable[LostCapability] = ()
    ) -> None:
        self._lost = {
            (lost_capability.capability, lost_capability.drafter): lost_capability
            for lost_capability in introduced
        }
        self._link = link

    @property
    def all(self) -> list[LostCapability]:
        """Returns the lost capabilities in the order in which they were lost."""
        return list(self._lost.values())

    def mark_lost(self, capability: Capability.ValueType, reason: str, drafter: str = "") -> None:
        """Marks a capability as lost until the engine restarts; repeated calls have no effect."""
        if (capability, drafter) in self._lost:
            return
        lost_capability = self._lost[capability, drafter] = make_lost_capability(
            capability, reason, drafter
        )
        subject = drafter or Capability.Name(capability).removeprefix("CAPABILITY_").lower()
        _log.error(
            "this engine has lost %s and tells the sidecar so: %s", subject, lost_capability.reason
        )
        if self._link is not None:
            self._link.report_lost_capability(lost_capability)

    def status(self) -> list[dict[str, object]]:
        """Returns every lost capability in plain values."""
        return [
            {
                "capability": Capability.Name(lost_capability.capability),
                "drafter": lost_capability.drafter,
                "reason": lost_capability.reason,
                "lost_at_unix_seconds": lost_capability.lost_at_unix_seconds,
            }
            for lost_capability in self._lost.values()
        ]
