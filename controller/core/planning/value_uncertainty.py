"""Computes how uncertain the value of an arm is relative to another's, and factors of caution.

Estimates that both arms share cancel out and do not affect a choice between the two.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.planning.planner import Values
from controller.core.settings import PlannerSettings


def relative_variance(
    values: Values,
    uncertainty: CostUncertainty,
    bucket: int,
    current_arm: int,
    *,
    only_unobserved: bool = False,
) -> NDArray[np.float64]:
    """Returns [arms], the variance of log(V_arm / V_current); shared estimates cancel.

    only_unobserved: only the uncertainty that steps of the current arm do not reduce: of positions
    beyond its draft length, of other drafters, and of costs.
    """
    acceptance = values.acceptance_uncertainty
    variances = (
        acceptance.unobserved_variances(current_arm)
        if only_unobserved
        else acceptance.variances([current_arm])[:, 0]
    )
    return uncertainty.relative_variance(bucket, current_arm) + variances


def expected_improvement(mean: float, sd: float) -> float:
    """Computes E[max(0, x)] of x ~ N(mean, sd^2)."""
    positive_sd = max(sd, 1e-9)
    u = mean / positive_sd
    density = math.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    cdf = 0.5 * (1 + math.erf(u / math.sqrt(2)))
    return max(positive_sd * density + mean * cdf, 0.0)


class DiscountRule:
    """Computes factors on the values of arms whose costs were not measured.

    A longer draft must pay even in a bad case:

        V'(arm, B) = V(arm, B) exp(-z sd(log V(arm, B) / V(current, B)))   for arms that draft more

    `current` is the newest choice for the batch size that has run at any batch size.  If none
    has run (at the start, or if an override chose an arm and was cleared before a step ran) it is
    gamma = 0.  A choice that has not run yet does not replace it: relative to that, the previous
    choice would be uncertain, and the two would alternate until a step runs.  sd covers costs and
    acceptance.  It is large before the first steps and shrinks with evidence, so that drafts get
    longer step by step.  Arms that draft less than `current` are not discounted.
    """

    def __init__(self, arms: Sequence[Arm], settings: PlannerSettings) -> None:
        gammas = [arm.gamma for arm in arms]
        self._shortest_arm = gammas.index(min(gammas))
        # [current arms, arms]
        self._drafts_more = np.array(
            [
                [
                    arm.gamma > current.gamma or (arm.gamma > 0 and arm.drafter != current.drafter)
                    for arm in arms
                ]
                for current in arms
            ]
        )
        self._deviations = np.array(
            [settings.extend_deviations if gamma else settings.start_deviations for gamma in gammas]
        )

    def discounts(
        self,
        values: Values,
        uncertainty: CostUncertainty,
        buckets: NDArray[np.int64],
        proven_arms: Sequence[int | None],
    ) -> NDArray[np.float64] | None:
        """Returns [arms, rows] factors in (0, 1] on the values; None if costs were measured.

        buckets: [rows], the cost table's.  proven_arms: [rows], newest choice that has run, by arm
        index, or None.
        """
        if not uncertainty.is_unprofiled:
            return None
        current_arms = [self._shortest_arm if arm is None else arm for arm in proven_arms]
        distinct_arms = list(dict.fromkeys(current_arms))
        acceptance_variances = values.acceptance_uncertainty.variances(distinct_arms)
        variance = uncertainty.relative_variances(buckets, np.array(current_arms))
        variance += acceptance_variances[:, [distinct_arms.index(arm) for arm in current_arms]]
        pessimism = np.exp(-self._deviations[current_arms] * np.sqrt(variance))
        return np.where(self._drafts_more[current_arms].T, pessimism, 1.0)
