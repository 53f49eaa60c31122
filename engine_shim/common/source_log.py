"""Logs who decides: the sidecar, its last plan, or the safe default."""

from __future__ import annotations

import logging

from engine_shim.link.plan_follower import Source

_log = logging.getLogger(__name__)


def log_source(old: Source, new: Source) -> None:
    """Writes a line about a source of choices that has changed."""
    if new is Source.PLAN:
        _log.info("the sidecar steers (before: %s)", old.value)
    else:
        _log.warning("the sidecar does not steer: %s (before: %s)", new.value, old.value)
