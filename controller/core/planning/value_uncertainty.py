"""Computes how uncertain the value of an arm is relative to another's, and factors of caution.

Estimates that both arms share cancel out and do not affect a choice between the two.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.planning.planner import Values

# Standard deviations of pessimism: for starting speculation, and for longer drafts than those that
# have run.
_DEVIATIONS_TO_START = 2.5
_DEVIATIONS_TO_EXTEND = 1.0


def relative_variance(
    values: Values,
    uncertainty: CostUncertainty,
    arms: Sequence[Arm],
    bucket: int,
    current_arm: int,
    *,
    only_unobserved: bool = False,
) -> NDArray[np.float64]:
    """Returns [arms], the variance of log(V_arm / V_current); shared estimates cancel.

    only_unobserved: only the uncertainty that steps of the current arm do not reduce: of positions
    beyond its draft length, of other drafters, and of costs.
    """
    acceptance = AcceptanceUncertainty(values.traffic, arms)
    return uncertainty.relative_variance(bucket, current_arm) + acceptance.variance(
        current_arm, only_unobserved=only_unobserved
    )


class AcceptanceUncertainty:
    """Holds the uncertainty of the arms' tokens because of acceptance; immutable.

    The positions of all drafters are concatenated.
    """

    def __init__(self, traffic: TrafficCurves, arms: Sequence[Arm]) -> None:
        self._traffic, self._arms = traffic, arms
        positions = sum([len(curve.conditional) for curve in traffic.last_batch.values()])
        # [arms, positions], d log(1 + E_arm) / d component_k; [positions], the variance of
        # component k.
        self._slopes = np.zeros((len(arms), positions))
        self._variance = np.empty(positions)
        self._first_positions: dict[str, int] = {}
        first_position = 0
        for name, curve in traffic.last_batch.items():
            end_position = first_position + len(curve.conditional)
            drafter_arms = [i for i, arm in enumerate(arms) if arm.drafter == name]
            slopes, self._variance[first_position:end_position] = curve.independent_components()
            slopes /= (1 + np.array(curve.expected_accepted))[:, None]
            self._slopes[drafter_arms, first_position:end_position] = slopes[
                [arms[i].gamma for i in drafter_arms]
            ]
            self._first_positions[name], first_position = first_position, end_position

    def variance(self, current: int, *, only_unobserved: bool = False) -> NDArray[np.float64]:
        """Returns [arms], the variance of log((1 + E_arm) / (1 + E_current)).

        only_unobserved: as in `relative_variance`.
        """
        variance, current_arm = self._variance, self._arms[current]
        if only_unobserved:
            first_position = self._first_positions[current_arm.drafter]
            variance = variance.copy()
            variance[first_position : first_position + current_arm.gamma] = 0.0
        log_variance: NDArray[np.float64] = (self._slopes - self._slopes[current]) ** 2 @ variance
        return log_variance + self._state_variance(current)

    def _state_variance(self, current: int) -> NDArray[np.float64] | float:
        """Returns [arms], the variance of the same from the uncertainty of the traffic state."""
        traffic = self._traffic
        if traffic.state_probabilities is None:
            return 0.0
        log_tokens = np.log1p(traffic.expected_accepted_by_state(self._arms))
        difference = log_tokens - log_tokens[:, current : current + 1]
        weights = traffic.state_probabilities[traffic.octave]
        variance: NDArray[np.float64] = weights @ difference**2 - (weights @ difference) ** 2
        return np.maximum(variance, 0.0)


def expected_improvement(mean: NDArray[np.float64], sd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes E[max(0, x)] of x ~ N(mean, sd^2), elementwise."""
    positive_sd = np.maximum(sd, 1e-9)
    u = mean / positive_sd
    density = np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    cdf = 0.5 * (1 + _erf(u / math.sqrt(2)))
    return np.maximum(positive_sd * density + mean * cdf, 0.0)


def _erf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the error function, which numpy lacks."""
    return np.array([math.erf(value) for value in x])


def compute_discounts(
    values: Values,
    uncertainty: CostUncertainty,
    arms: Sequence[Arm],
    buckets: NDArray[np.int64],
    proven_arms: Sequence[int | None],
) -> NDArray[np.float64] | None:
    """Returns [arms, rows] factors in (0, 1] on the values; None if costs were measured.

    They account for costs that were not measured: a longer draft must pay even in a bad case.

        V'(arm, B) = V(arm, B) exp(-z sd(log V(arm, B) / V(current, B)))   for arms that draft more

    `current` is the newest choice for the batch size that has run at any batch size.  If none
    has run (at the start, or if an override chose an arm and was cleared before a step ran) it is
    gamma = 0.  A choice that has not run yet does not replace it: relative to that, the previous
    choice would be uncertain, and the two would alternate until a step runs.  sd covers costs and
    acceptance.  It is large before the first steps and shrinks with evidence, so that drafts get
    longer step by step.  Arms that draft less than `current` are not discounted.

    buckets: [rows], the cost table's.  proven_arms: [rows], newest choice that has run, by arm
    index, or None.
    """
    if not uncertainty.is_unprofiled:
        return None
    gammas = np.array([arm.gamma for arm in arms])
    shortest_arm = int(gammas.argmin())
    current_arms = np.array([shortest_arm if arm is None else arm for arm in proven_arms])
    acceptance = AcceptanceUncertainty(values.traffic, arms)
    variance_by_arm = {arm: acceptance.variance(arm) for arm in set(current_arms.tolist())}
    variance = (
        uncertainty.relative_variances(buckets, current_arms)
        + np.array([variance_by_arm[arm] for arm in current_arms.tolist()]).T
    )
    names = list(dict.fromkeys(arm.drafter for arm in arms))
    drafter = np.array([names.index(arm.drafter) for arm in arms])
    is_other_drafter = (gammas[:, None] > 0) & (drafter[:, None] != drafter[current_arms])
    drafts_more = is_other_drafter | (gammas[:, None] > gammas[current_arms])
    z = np.where(gammas[current_arms] > 0, _DEVIATIONS_TO_EXTEND, _DEVIATIONS_TO_START)
    return np.where(drafts_more, np.exp(-z * np.sqrt(variance)), 1.0)
