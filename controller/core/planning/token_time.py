"""Bounds the mean time between a sequence's output tokens, row by row.

    t(d, gamma, B) = C(d, B, gamma, kv) / (1 + E_d[accepted | gamma]) = B / V(d, gamma, B)

At a given batch size, the arm with the most tokens per second therefore has the smallest t, so a
bound does not trade throughput for latency.  A bound changes the choice only where V alone does not
determine it: through the price of not observing, a published rule, the cost of a switch, or a
probe.  If no arm meets the bound, the one with the smallest t runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm
from controller.core.planning.overrides import Limits

# Factor on the value of an arm that exceeds a bound which another arm meets.
_BROKEN = 1e-9


@dataclass(frozen=True, slots=True)
class TokenTimeBound:
    """Bounds the time per output token in one row.

    seconds: the maximum.  override_id: of the override that sets it; "" = the setting.
    """

    seconds: float
    override_id: str = ""

    def __str__(self) -> str:
        whose = f" (override {self.override_id})" if self.override_id else ""
        return f"bound of {1e3 * self.seconds:g} ms a token{whose}"


def bounds_of(
    ceiling_seconds: float, limits: Sequence[Limits]
) -> tuple[TokenTimeBound | None, ...]:
    """Returns the bound of each row; an empty tuple if no row has one.

    ceiling_seconds: of the setting, 0 = none.  limits: of each row.
    """
    found = tuple(_strictest(ceiling_seconds, limit) for limit in limits)
    return found if any(found) else ()


def _strictest(ceiling_seconds: float, limits: Limits) -> TokenTimeBound | None:
    asked = limits.tpot_max_seconds
    if asked is not None and not 0 < ceiling_seconds <= asked:
        return TokenTimeBound(asked, limits.tpot_by)
    return TokenTimeBound(ceiling_seconds) if ceiling_seconds > 0 else None


class RowBounds:
    """Holds the bounds of a plan's rows for the planner; immutable.

    seconds: [rows], inf where there is no bound.  commanded: for each row, whether an override sets
    its bound.
    """

    def __init__(self, arms: Sequence[Arm], bounds: Sequence[TokenTimeBound | None]) -> None:
        self.seconds = np.array([np.inf if b is None else b.seconds for b in bounds])
        self.commanded = tuple(b is not None and b.override_id != "" for b in bounds)
        self._arms = tuple(arms)
        # By drafter, [arms], whether an arm drafts with it.
        self._drafting_of = {
            name: np.array([arm.drafter == name and arm.gamma > 0 for arm in arms])
            for name in dict.fromkeys(arm.drafter for arm in arms)
        }

    def keeping(
        self, tpot: NDArray[np.float64], running: Sequence[int] | None, margin: float
    ) -> NDArray[np.bool_]:
        """Returns [arms, rows], whether an arm meets a row's bound.

        tpot: [arms, rows] seconds.  running: the present choice of each row, by arm index; it may
        exceed the bound by `margin`, so that noise at the bound does not cause switching.
        """
        keeps: NDArray[np.bool_] = tpot <= self.seconds
        if running is not None:
            rows = np.arange(len(self.seconds))
            keeps[running, rows] |= tpot[running, rows] <= self.seconds * (1 + margin)
        return keeps

    def looked_at(
        self, value: NDArray[np.float64], keeps: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Returns [arms, rows], the values by which probes from gamma = 0 are priced.

        Only arms that meet the bound are probed.  If no arm of a drafter meets it, its arms are
        priced as without a bound.
        """
        seen = narrowed(value, value, keeps)
        for drafting in self._drafting_of.values():
            none = ~keeps[drafting].any(axis=0)
            seen = np.where(drafting[:, None] & none, value, seen)
        return seen

    def may_probe(
        self,
        row: int,
        now: int,
        tpot: NDArray[np.float64],
        step_seconds: NDArray[np.float64],
        feasible: NDArray[np.bool_] | None,
        share: float,
    ) -> NDArray[np.bool_] | None:
        """Returns [arms], which may be probed in a row; None: all.

        An arm that exceeds the row's bound may not be probed, with three exceptions.  gamma = 0 may
        always be probed, as a check on wrong estimates.  If no arm meets the bound, all may, since
        probes may find one that does.  If the running arm gives no evidence about a drafter
        (gamma = 0, or another drafter) and meets the bound with a margin for the cost of probing,
        those of the drafter's arms may be probed that would meet the bound if every draft were
        accepted, because only a probe can show that the traffic has changed.

        now: index of the running arm.  tpot, step_seconds: [arms] of the row.  feasible: [arms]
        that overrides and the engine allow, None = all.  share: share of the time that probing may
        cost in the row.
        """
        most = self.seconds[row]
        keeps: NDArray[np.bool_] = tpot <= most
        if feasible is not None:
            keeps = keeps & feasible
        if not keeps.any():
            return feasible
        keeps |= [arm.gamma == 0 for arm in self._arms]
        if tpot[now] <= most * (1 - share):
            # A sequence gains at most gamma + 1 tokens in a step.
            gained = np.array([arm.gamma + 1.0 for arm in self._arms])
            keeps |= self._is_unseen(self._arms[now]) & (step_seconds <= most * gained)
        return keeps if feasible is None else keeps & feasible

    def _is_unseen(self, now: Arm) -> NDArray[np.bool_]:
        """Returns [arms], the drafting arms about which the running arm gives no evidence."""
        seen = now.drafter if now.gamma else None
        return np.array([arm.gamma > 0 and arm.drafter != seen for arm in self._arms])


def narrowed(
    value: NDArray[np.float64], plain: NDArray[np.float64], keeps: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Returns [arms, rows], values that are almost 0 where an arm exceeds the bound.

    In rows where no arm meets it: `plain`, which is largest where the time per token is smallest.
    keeps: [arms, rows], whether an arm meets its bound; None = there are no bounds.
    """
    if keeps is None:
        return value
    kept = np.where(keeps, value, value * _BROKEN)
    return np.where(keeps.any(axis=0), kept, plain)
