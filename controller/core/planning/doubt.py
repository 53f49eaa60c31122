"""Computes how uncertain the value of an arm is relative to another's, and factors of caution.

Estimates that both arms share cancel out and do not affect a choice between the two.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.by_class import TrafficCurves
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.planning.planner import Values

# Standard deviations of pessimism: for starting speculation, and for longer drafts than those that
# have run.
_DEVIATIONS_TO_BEGIN = 2.5
_DEVIATIONS_TO_EXTEND = 1.0


def relative_variance(
    values: Values,
    uncertainty: CostUncertainty,
    arms: Sequence[Arm],
    bucket: int,
    current: int,
    *,
    unseen: bool = False,
) -> NDArray[np.float64]:
    """Returns [arms], the variance of log(V_arm / V_current); shared estimates cancel.

    unseen: only the uncertainty that steps of the current arm do not reduce: of positions beyond
    its draft length, of other drafters, and of costs.
    """
    doubt = AcceptanceDoubt(values.traffic, arms)
    return uncertainty.relative(bucket, current) + doubt.variance(current, unseen=unseen)


class AcceptanceDoubt:
    """Holds the uncertainty of the arms' tokens because of acceptance; immutable.

    The positions of all drafters are concatenated.
    """

    def __init__(self, traffic: TrafficCurves, arms: Sequence[Arm]) -> None:
        self._traffic, self._arms = traffic, arms
        positions = sum([len(curve.conditional) for curve in traffic.batch.values()])
        # [arms, positions], d log(1 + E_arm) / d part_k; [positions], the variance of part k.
        self._slopes = np.zeros((len(arms), positions))
        self._variance = np.empty(positions)
        self._begins: dict[str, int] = {}
        begin = 0
        for name, curve in traffic.batch.items():
            end = begin + len(curve.conditional)
            mine = [i for i, arm in enumerate(arms) if arm.drafter == name]
            slopes, self._variance[begin:end] = curve.independent_parts()
            slopes /= (1 + np.array(curve.expected))[:, None]
            self._slopes[mine, begin:end] = slopes[[arms[i].gamma for i in mine]]
            self._begins[name], begin = begin, end

    def variance(self, current: int, *, unseen: bool = False) -> NDArray[np.float64]:
        """Returns [arms], the variance of log((1 + E_arm) / (1 + E_current)).

        unseen: as in `relative_variance`.
        """
        variance, running = self._variance, self._arms[current]
        if unseen:
            begin = self._begins[running.drafter]
            variance = variance.copy()
            variance[begin : begin + running.gamma] = 0.0
        found: NDArray[np.float64] = (self._slopes - self._slopes[current]) ** 2 @ variance
        return found + self._of_state(current)

    def _of_state(self, current: int) -> NDArray[np.float64] | float:
        """Returns [arms], the variance of the same from the uncertainty of the traffic state."""
        traffic = self._traffic
        if traffic.likely is None:
            return 0.0
        gained = np.log1p(traffic.by_state(self._arms))
        apart = gained - gained[:, current : current + 1]
        weights = traffic.likely[traffic.octave]
        variance: NDArray[np.float64] = weights @ apart**2 - (weights @ apart) ** 2
        return np.maximum(variance, 0.0)


def expected_improvement(mean: NDArray[np.float64], sd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes E[max(0, x)] of x ~ N(mean, sd^2), elementwise."""
    safe = np.maximum(sd, 1e-9)
    u = mean / safe
    density = np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + _erf(u / math.sqrt(2)))
    return np.maximum(safe * density + mean * below, 0.0)


def _erf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the error function, which numpy lacks."""
    return np.array([math.erf(value) for value in x])


def discounts(
    values: Values,
    doubts: CostUncertainty,
    arms: Sequence[Arm],
    buckets: NDArray[np.int64],
    proven: Sequence[int | None],
) -> NDArray[np.float64] | None:
    """Returns [arms, rows] factors in (0, 1] on the values; None if costs were measured.

    They account for costs that were not measured: a longer draft must pay even in a bad case.

        V'(arm, B) = V(arm, B) exp(-z sd(log V(arm, B) / V(now, B)))   for arms that draft more

    `now` is the newest choice for the batch size that has run at any batch size.  If none has run
    (at the start, or if an override chose an arm and was cleared before a step ran) it is
    gamma = 0.  A choice that has not run yet does not replace it: relative to that, the previous
    choice would be uncertain, and the two would alternate until a step runs.  sd covers costs and
    acceptance.  It is large before the first steps and shrinks with evidence, so that drafts get
    longer step by step.  Arms that draft less than `now` are not discounted.

    buckets: [rows], the cost table's.  proven: [rows], newest choice that has run, by arm index,
    or None.
    """
    if not doubts.guessed:
        return None
    gammas = np.array([arm.gamma for arm in arms])
    least = int(gammas.argmin())
    now = np.array([least if arm is None else arm for arm in proven])
    acceptance = AcceptanceDoubt(values.traffic, arms)
    by_arm = {arm: acceptance.variance(arm) for arm in set(now.tolist())}
    doubt = doubts.relatives(buckets, now) + np.array([by_arm[arm] for arm in now.tolist()]).T
    names = list(dict.fromkeys(arm.drafter for arm in arms))
    drafter = np.array([names.index(arm.drafter) for arm in arms])
    others = (gammas[:, None] > 0) & (drafter[:, None] != drafter[now])
    more = others | (gammas[:, None] > gammas[now])
    z = np.where(gammas[now] > 0, _DEVIATIONS_TO_EXTEND, _DEVIATIONS_TO_BEGIN)
    return np.where(more, np.exp(-z * np.sqrt(doubt)), 1.0)
