"""Keeps a log of a session's plan changes, and logs its warnings."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from controller.core.checks.engine_checks import EngineWarning, WarningKind
from controller.core.plan import Plan

# Changes that a session remembers.
PLAN_LOG_LENGTH = 50
# A recurring warning is logged once in this time.
_REPEAT_SECONDS = 3600.0
# Warnings whose time is remembered, the latest ones.  An engine has at most 24 at a time, but can
# return under its id with other drafters.
_LOGGED_WARNINGS_MAX = 64

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
    def from_plans(
        cls, time: float, batch_size: int, previous_plan: Plan, plan: Plan
    ) -> "PlanLogEntry":
        """Makes an entry at the batch size that was reported last."""
        previous_arm, arm = previous_plan.row_for(batch_size).arm, plan.row_for(batch_size).arm
        return cls(
            time,
            plan.epoch,
            batch_size,
            f"{previous_arm.drafter} {previous_arm.gamma}",
            f"{arm.drafter} {arm.gamma}",
            str(plan.regime),
            plan.reason.value,
            plan.reason_detail,
            plan.overrides,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry as a dictionary."""
        return asdict(self)


class WarningLog:
    """Logs when a warning about an engine begins and when it ends.

    It remembers the warnings of one engine by kind and drafter.
    """

    def __init__(self) -> None:
        self._logged_at: dict[tuple[WarningKind, str], float] = {}
        # Warnings that were logged and have not ended.
        self._active_keys: set[tuple[WarningKind, str]] = set()

    def log_changes(self, engine_id: str, warnings: Iterable[EngineWarning], now: float) -> None:
        """Logs the warnings that are new, and the end of those that are over.  now: seconds."""
        active_warnings = {(warning.kind, warning.drafter): warning for warning in warnings}
        for key, warning in active_warnings.items():
            if (
                key not in self._active_keys
                and now - self._logged_at.get(key, -math.inf) >= _REPEAT_SECONDS
            ):
                self._active_keys.add(key)
                self._logged_at.pop(key, None)
                self._logged_at[key] = now
                if len(self._logged_at) > _LOGGED_WARNINGS_MAX:
                    del self._logged_at[next(iter(self._logged_at))]
                _log.warning(
                    "engine_warning",
                    engine=engine_id,
                    kind=warning.kind.value,
                    drafter=warning.drafter,
                    found=warning.found,
                    advice=warning.advice,
                )
        for kind, drafter in self._active_keys - active_warnings.keys():
            self._active_keys.discard((kind, drafter))
            _log.info("engine_warning_ended", engine=engine_id, kind=kind.value, drafter=drafter)
