"""Keeps an engine's latest plan changes: when, from what to what, and why."""

from dataclasses import asdict, dataclass
from typing import Any

from controller.core.plan import Plan

# Changes that a session remembers.
LENGTH = 50


@dataclass(frozen=True, slots=True)
class PlanLogEntry:
    """A plan that told an engine something else.  time: Unix seconds; arms as "DRAFTER GAMMA"."""

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
