"""Keeps a log of a session's plan changes, and logs its warnings."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from controller.core.checks.engine_checks import EngineWarning, WarningKind
from controller.core.plan import Plan

# Changes that a session remembers.
LENGTH = 50
# A recurring warning is logged once in this time.
_AGAIN_SECONDS = 3600.0
# Warnings whose time is remembered, the latest ones.  An engine has at most 24 at a time, but can
# return under its id with other drafters.
_TOLD_KEPT = 64

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlanLogEntry:
    """Describes a change of plan.  time: Unix seconds; was, arm: "DRAFTER GAMMA"."""

    time: float
    epoch: int
    batch_size: int
    was: str
    arm: str
    regime: str
    reason: str
    detail: str
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, time: float, batch_size: int, before: Plan, plan: Plan) -> "PlanLogEntry":
        """Makes an entry at the batch size that was reported last."""
        was, arm = before.row_for(batch_size).arm, plan.row_for(batch_size).arm
        return cls(
            time,
            plan.epoch,
            batch_size,
            f"{was.drafter} {was.gamma}",
            f"{arm.drafter} {arm.gamma}",
            str(plan.regime),
            plan.reason.value,
            plan.reason_detail,
            plan.overrides,
        )

    def plain(self) -> dict[str, Any]:
        """Returns the entry as a dictionary."""
        return asdict(self)


class WarningLog:
    """Logs when a warning about an engine begins and when it ends.

    It remembers the warnings of one engine by kind and drafter.
    """

    def __init__(self) -> None:
        self._told_at: dict[tuple[WarningKind, str], float] = {}
        # Warnings that were logged and have not ended.
        self._open: set[tuple[WarningKind, str]] = set()

    def tell(self, engine_id: str, warnings: Iterable[EngineWarning], now: float) -> None:
        """Logs the warnings that are new, and the end of those that are over.  now: seconds."""
        present = {(warning.kind, warning.drafter): warning for warning in warnings}
        for key, warning in present.items():
            if key not in self._open and now - self._told_at.get(key, -math.inf) >= _AGAIN_SECONDS:
                self._open.add(key)
                self._told_at.pop(key, None)
                self._told_at[key] = now
                if len(self._told_at) > _TOLD_KEPT:
                    del self._told_at[next(iter(self._told_at))]
                _log.warning(
                    "engine_warning",
                    engine=engine_id,
                    kind=warning.kind.value,
                    drafter=warning.drafter,
                    found=warning.found,
                    advice=warning.advice,
                )
        for kind, drafter in self._open - present.keys():
            self._open.discard((kind, drafter))
            _log.info("engine_warning_ended", engine=engine_id, kind=kind.value, drafter=drafter)
