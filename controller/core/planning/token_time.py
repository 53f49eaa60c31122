"""Bounds the mean time between a sequence's output tokens, row by row.

    t(d, gamma, B) = C(d, B, gamma, kv) / (1 + E_d[accepted | gamma]) = B / V(d, gamma, B)

At a given batch size, the arm with the most tokens per second therefore has the smallest t, so a
bound does not trade throughput for latency.  A bound changes the choice only where V alone does not
determine it: through a published rule, the cost of a switch, or a probe.  If no arm meets the
bound, the one with the smallest t runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm
from controller.core.planning.overrides import Limits

# Factor on the value of an arm that exceeds a bound which another arm meets.
_VIOLATION_FACTOR = 1e-9


@dataclass(frozen=True, slots=True)
class TokenTimeBound:
    """Bounds the time per output token in one row.

    seconds: the maximum.  override_id: of the override that sets it; "" = the setting.
    """

    seconds: float
    override_id: str = ""

    def __str__(self) -> str:
        source = f" (override {self.override_id})" if self.override_id else ""
        return f"bound of {1e3 * self.seconds:g} ms a token{source}"


def token_time_bounds(
    tpot_max_seconds: float, limits: Sequence[Limits]
) -> tuple[TokenTimeBound | None, ...]:
    """Returns the bound of each row; an empty tuple if no row has one.

    tpot_max_seconds: of the setting, 0 = none.  limits: of each row.
    """
    bounds = tuple(_strictest_bound(tpot_max_seconds, limit) for limit in limits)
    return bounds if any(bounds) else ()


def _strictest_bound(tpot_max_seconds: float, limits: Limits) -> TokenTimeBound | None:
    override_seconds = limits.tpot_max_seconds
    if override_seconds is not None and not 0 < tpot_max_seconds <= override_seconds:
        return TokenTimeBound(override_seconds, limits.tpot_by)
    return TokenTimeBound(tpot_max_seconds) if tpot_max_seconds > 0 else None


class RowBounds:
    """Holds the bounds of a plan's rows for the planner; immutable.

    seconds: [rows], inf where there is no bound.  is_from_override: for each row, whether an
    override sets its bound.
    """

    def __init__(self, arms: Sequence[Arm], bounds: Sequence[TokenTimeBound | None]) -> None:
        self.seconds = np.array([np.inf if b is None else b.seconds for b in bounds])
        self.is_from_override = tuple(b is not None and b.override_id != "" for b in bounds)
        self._arms = tuple(arms)

    def arms_within_bounds(
        self, tpot_seconds: NDArray[np.float64], current_arms: Sequence[int] | None, margin: float
    ) -> NDArray[np.bool_]:
        """Returns [arms, rows], whether an arm meets a row's bound.

        tpot_seconds: [arms, rows] seconds.  current_arms: the present choice of each row, by arm
        index; it may exceed the bound by `margin`, so that noise at the bound does not cause
        switching.
        """
        is_within_bounds: NDArray[np.bool_] = tpot_seconds <= self.seconds
        if current_arms is not None:
            rows = np.arange(len(self.seconds))
            is_within_bounds[current_arms, rows] |= tpot_seconds[
                current_arms, rows
            ] <= self.seconds * (1 + margin)
        return is_within_bounds

    def probe_candidates(
        self,
        row: int,
        current_arm: int,
        tpot_seconds: NDArray[np.float64],
        step_seconds: NDArray[np.float64],
        feasible: NDArray[np.bool_] | None,
        probing_share: float,
    ) -> NDArray[np.bool_] | None:
        """Returns [arms], which may be probed in a row; None: all.

        An arm that exceeds the row's bound may not be probed, with three exceptions.  gamma = 0 may
        always be probed, as a check on wrong estimates.  If no arm meets the bound, all may, since
        probes may find one that does.  If the running arm gives no evidence about a drafter
        (gamma = 0, or another drafter) and meets the bound with a margin for the cost of probing,
        those of the drafter's arms may be probed that would meet the bound if every draft were
        accepted, because only a probe can show that the traffic has changed.

        current_arm: index of the running arm.  tpot_seconds, step_seconds: [arms] of the row.
        feasible: [arms] that overrides and the engine allow, None = all.  probing_share: share of
        the time that probing may cost in the row.
        """
        max_seconds = self.seconds[row]
        is_candidate: NDArray[np.bool_] = tpot_seconds <= max_seconds
        if feasible is not None:
            is_candidate = is_candidate & feasible
        if not is_candidate.any():
            return feasible
        is_candidate |= [arm.gamma == 0 for arm in self._arms]
        if tpot_seconds[current_arm] <= max_seconds * (1 - probing_share):
            # A sequence gains at most gamma + 1 tokens in a step.
            max_tokens = np.array([arm.gamma + 1.0 for arm in self._arms])
            is_candidate |= self._is_unobserved(self._arms[current_arm]) & (
                step_seconds <= max_seconds * max_tokens
            )
        return is_candidate if feasible is None else is_candidate & feasible

    def _is_unobserved(self, current_arm: Arm) -> NDArray[np.bool_]:
        """Returns [arms], the drafting arms about which the running arm gives no evidence."""
        running_drafter = current_arm.drafter if current_arm.gamma else None
        return np.array([arm.gamma > 0 and arm.drafter != running_drafter for arm in self._arms])


def apply_bounds(
    value: NDArray[np.float64], is_within_bounds: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Returns [arms, rows], values that are almost 0 where an arm exceeds the bound.

    In rows where no arm meets it, the values are left as they are: they are largest where the time
    per token is smallest.  is_within_bounds: [arms, rows], whether an arm meets its bound; None =
    there are no bounds.
    """
    if is_within_bounds is None:
        return value
    bounded = np.where(is_within_bounds, value, value * _VIOLATION_FACTOR)
    return np.where(is_within_bounds.any(axis=0), bounded, value)
