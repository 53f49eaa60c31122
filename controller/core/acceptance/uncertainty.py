"""Computes how uncertain the arms' expected tokens are relative to each other.

An arm's uncertainty is a sum over the positions of its own drafter.  What two arms of one drafter
share cancels; the uncertainties of two drafters add up.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.engine_spec import Arm


class AcceptanceUncertainty:
    """Holds the uncertainty of the arms' tokens because of acceptance, at one moment."""

    def __init__(self, traffic: TrafficCurves, arms: Sequence[Arm]) -> None:
        self._traffic, self._arms = traffic, arms
        # By drafter: the variance of component k of its positions, and by draft length
        # d log(1 + E) / d component k.
        curves = traffic.last_batch
        self._variances = {name: curve.component_variances() for name, curve in curves.items()}
        self._slopes = {name: curve.component_slopes() for name, curve in curves.items()}
        # By state and arm; None: the traffic state is certain.
        self._log_tokens_by_state: NDArray[np.float64] | None = None
        if traffic.state_probabilities is not None:
            self._log_tokens_by_state = np.log1p(traffic.expected_accepted_by_state(arms))

    def variance(self, current: int, *, only_unobserved: bool = False) -> NDArray[np.float64]:
        """Returns [arms], the variance of log((1 + E_arm) / (1 + E_current)).

        only_unobserved: without the positions that steps of the current arm observe.
        """
        current_arm = self._arms[current]
        # The current arm's slopes are 0 at the positions that its steps do not observe.
        first = current_arm.gamma if only_unobserved else 0
        current_slopes = self._slopes[current_arm.drafter][current_arm.gamma]
        current_variance = 0.0
        if not only_unobserved:
            current_variance = self._own_variance(current_arm)
        component_variances = self._variances[current_arm.drafter]
        variances = []
        for arm in self._arms:
            if arm.drafter != current_arm.drafter:
                variances.append(self._own_variance(arm) + current_variance)
                continue
            variance = 0.0
            slopes = self._slopes[arm.drafter][arm.gamma]
            for k in range(first, max(arm.gamma, current_arm.gamma)):
                variance += (slopes[k] - current_slopes[k]) ** 2 * component_variances[k]
            variances.append(variance)
        return np.array(variances) + self._state_variance(current)

    def _own_variance(self, arm: Arm) -> float:
        """Returns the variance of log(1 + E_arm)."""
        slopes = self._slopes[arm.drafter][arm.gamma][: arm.gamma]
        components = zip(slopes, self._variances[arm.drafter], strict=False)
        return sum([slope * slope * variance for slope, variance in components])

    def _state_variance(self, current: int) -> NDArray[np.float64] | float:
        """Returns [arms], the variance of the same from the uncertainty of the traffic state."""
        log_tokens, probabilities = self._log_tokens_by_state, self._traffic.state_probabilities
        if log_tokens is None or probabilities is None:
            return 0.0
        difference = log_tokens - log_tokens[:, current : current + 1]
        weights = probabilities[self._traffic.octave]
        variance: NDArray[np.float64] = weights @ difference**2 - (weights @ difference) ** 2
        return np.maximum(variance, 0.0)
