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
        # By drafter, the variance of component k of its positions.
        self._variances = {
            name: curve.component_variances() for name, curve in traffic.last_batch.items()
        }
        # By arm: d log(1 + E_arm) / d component k, and the variance of log(1 + E_arm).
        self._slopes = [self._relative_slopes(arm) for arm in arms]
        self._own_variances = [
            _weighted_square_sum(slopes, self._variances[arm.drafter])
            for arm, slopes in zip(arms, self._slopes, strict=True)
        ]
        # By state and arm; None: the traffic state is certain.
        self._log_tokens_by_state: NDArray[np.float64] | None = None
        if traffic.state_probabilities is not None:
            self._log_tokens_by_state = np.log1p(traffic.expected_accepted_by_state(arms))

    def _relative_slopes(self, arm: Arm) -> list[float]:
        curve = self._traffic.last_batch[arm.drafter]
        tokens = 1 + curve.expected_accepted[arm.gamma]
        return [slope / tokens for slope in curve.component_slopes(arm.gamma)]

    def variance(self, current: int, *, only_unobserved: bool = False) -> NDArray[np.float64]:
        """Returns [arms], the variance of log((1 + E_arm) / (1 + E_current)).

        only_unobserved: without the positions that steps of the current arm observe.
        """
        current_arm, current_slopes = self._arms[current], self._slopes[current]
        # The current arm's slopes are 0 at the positions that its steps do not observe.
        first = current_arm.gamma if only_unobserved else 0
        current_variance = 0.0 if only_unobserved else self._own_variances[current]
        shared_variances = self._variances[current_arm.drafter][first:]
        variances = [
            own_variance + current_variance
            if arm.drafter != current_arm.drafter
            else _weighted_square_sum(
                [a - b for a, b in zip(slopes[first:], current_slopes[first:], strict=True)],
                shared_variances,
            )
            for arm, slopes, own_variance in zip(
                self._arms, self._slopes, self._own_variances, strict=True
            )
        ]
        return np.array(variances) + self._state_variance(current)

    def _state_variance(self, current: int) -> NDArray[np.float64] | float:
        """Returns [arms], the variance of the same from the uncertainty of the traffic state."""
        log_tokens, probabilities = self._log_tokens_by_state, self._traffic.state_probabilities
        if log_tokens is None or probabilities is None:
            return 0.0
        difference = log_tokens - log_tokens[:, current : current + 1]
        weights = probabilities[self._traffic.octave]
        variance: NDArray[np.float64] = weights @ difference**2 - (weights @ difference) ** 2
        return np.maximum(variance, 0.0)


def _weighted_square_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum([value * value * weight for value, weight in zip(values, weights, strict=True)])
