"""Tracks the capabilities that an engine has lost since it introduced itself.

A drafter that ran out of memory, for example, cannot draft until the engine restarts.  The engine
reports each loss with its reason; the planner then neither chooses nor probes what was lost.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from controller.core.errors import InvalidLossError

if TYPE_CHECKING:
    from controller.core.engine_spec import Arm, Capabilities, EngineSpec

MAX_REASON_CHARACTERS = 512


class Capability(Enum):
    """Names everything that can be lost, as people read it."""

    DRAFTER = "drafter"
    SLEEP = "sleep"
    UPDATE_ONLINE = "online updates"
    COLLECT = "training signals"
    TAKE_VERSIONS = "drafter versions"
    REPORT = "step reports"


@dataclass(frozen=True, slots=True)
class LostCapability:
    """Describes one loss.  Raises InvalidLossError if it contradicts itself.

    drafter, gammas: for DRAFTER, which one and which of its draft lengths; () = all above 0, since
    a step at gamma = 0 needs no drafter.  lost_at: Unix seconds by the engine's clock.
    """

    capability: Capability
    drafter: str = ""
    gammas: tuple[int, ...] = ()
    reason: str = ""
    lost_at: float = 0.0

    def __post_init__(self) -> None:
        if (self.capability is Capability.DRAFTER) != bool(self.drafter):
            raise InvalidLossError(
                f"{self.capability.value} lost: a drafter must be named if and only if a drafter "
                f"was lost, not {self.drafter[:64]!r}",
                field_path="drafter",
            )
        if self.gammas and not self.drafter:
            raise InvalidLossError(
                f"{self.capability.value} lost: only a drafter has draft lengths, not this",
                field_path="gammas",
            )
        if not (math.isfinite(self.lost_at) and self.lost_at >= 0):
            raise InvalidLossError(
                f"lost_at {self.lost_at} must be finite and not negative",
                field_path="lost_at_unix_seconds",
            )
        if len(self.reason) > MAX_REASON_CHARACTERS or not self.reason.isprintable():
            raise InvalidLossError(
                f"the reason of a loss must have at most {MAX_REASON_CHARACTERS} printable "
                "characters",
                field_path="reason",
            )

    def covers(self, arm: "Arm") -> bool:
        """Returns whether the loss takes this arm away."""
        if arm.drafter != self.drafter:
            return False
        return arm.gamma in self.gammas if self.gammas else arm.gamma > 0

    @property
    def what(self) -> str:
        """Names the lost capability in a few words."""
        if not self.drafter:
            return self.capability.value
        lengths = f" at gamma {', '.join(map(str, self.gammas))}" if self.gammas else ""
        return f"drafter {self.drafter}{lengths}"


def require_known(losses: Iterable[LostCapability], spec: "EngineSpec") -> None:
    """Raises InvalidLossError for a drafter or a draft length that was not introduced."""
    known = {drafter.name: drafter.gammas for drafter in spec.drafters}
    for loss in losses:
        if not loss.drafter:
            continue
        if loss.drafter not in known:
            raise InvalidLossError(
                f"drafter {loss.drafter[:64]!r} is reported as lost: this engine introduced "
                f"{sorted(known)}",
                field_path="drafter",
            )
        if unknown := set(loss.gammas) - set(known[loss.drafter]):
            raise InvalidLossError(
                f"draft lengths {sorted(unknown)[:16]} of drafter {loss.drafter!r} are reported as "
                f"lost: this engine introduced {list(known[loss.drafter])}",
                field_path="gammas",
            )


def added(spec: "EngineSpec", losses: Iterable[LostCapability]) -> tuple[LostCapability, ...]:
    """Returns the losses that take away something more, in order; all must be known.

    An engine repeats its losses; the first report of each counts, with its reason and its time.
    """
    kinds = {loss.capability for loss in spec.lost}
    left = {drafter.name: set(drafter.gammas) for drafter in spec.drafters}
    for loss in spec.lost:
        _take(loss, left)
    news = []
    for loss in losses:
        more = _take(loss, left) if loss.drafter else loss.capability not in kinds
        if more:
            kinds.add(loss.capability)
            news.append(loss)
    return tuple(news)


def _take(loss: LostCapability, left: dict[str, set[int]]) -> bool:
    """Takes the draft lengths of a loss away; False when none of them was left."""
    if not loss.drafter:
        return False
    gammas = left[loss.drafter]
    taken = gammas & set(loss.gammas) if loss.gammas else gammas - {0}
    gammas -= taken
    return bool(taken)


def loss_of_all(spec: "EngineSpec", arms: Iterable["Arm"]) -> LostCapability | None:
    """Returns the first arm's loss if all of these arms are lost; None if one is left or given."""
    losses = [spec.loss_of(arm) for arm in arms]
    return losses[0] if losses and all(losses) else None


def is_blind(spec: "EngineSpec") -> bool:
    """Returns whether the engine has stopped reporting steps, so that probes show nothing."""
    return any(loss.capability is Capability.REPORT for loss in spec.lost)


def able(capabilities: "Capabilities", lost: Iterable[LostCapability]) -> "Capabilities":
    """Returns the capabilities that the losses leave."""
    kinds = {loss.capability for loss in lost}
    return replace(
        capabilities,
        can_sleep=capabilities.can_sleep and Capability.SLEEP not in kinds,
        can_update_online=capabilities.can_update_online and Capability.UPDATE_ONLINE not in kinds,
        can_collect=capabilities.can_collect and Capability.COLLECT not in kinds,
        can_take_versions=(
            capabilities.can_take_versions and Capability.TAKE_VERSIONS not in kinds
        ),
    )
