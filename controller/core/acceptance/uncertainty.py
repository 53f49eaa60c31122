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
    """Holds the uncertainty of the arms' tokens because of acceptance, at one moment.

    The positions of all drafters are concatenated.
    """

    def __init__(self, traffic: TrafficCurves, arms: Sequence[Arm]) -> None:
        self._traffic, self._arms = traffic, arms
        positions = sum([len(curve.conditional) for curve in traffic.last_batch.values()])
        # [arms, positions], d log(1 + E_arm) / d component k; [positions], its variance.
        self._slopes = np.zeros((len(arms), positions))
        variances: list[float] = []
        self._first_positions: dict[str, int] = {}
        for name, curve in traffic.last_batch.items():
            first = self._first_positions[name] = len(variances)
            variances += curve.component_variances()
            slopes = curve.component_slopes()
            drafter_arms = [i for i, arm in enumerate(arms) if arm.drafter == name]
            self._slopes[drafter_arms, first : len(variances)] = [
                slopes[arms[i].gamma] for i in drafter_arms
            ]
        self._variances = np.array(variances)
        # By state and arm; None: the traffic state is certain.
        self._log_tokens_by_state: NDArray[np.float64] | None = None
        if traffic.state_probabilities is not None:
            self._log_tokens_by_state = np.log1p(traffic.expected_accepted_by_state(arms))

    def variances(self, current_arms: Sequence[int]) -> NDArray[np.float64]:
        """Returns [arms, current_arms], the variance of log((1 + E_arm) / (1 + E_current))."""
        difference = self._slopes[:, None] - self._slopes[current_arms]
        variances: NDArray[np.float64] = difference**2 @ self._variances
        return variances + self._state_variances(current_arms)

    def unobserved_variances(self, current_arm: int) -> NDArray[np.float64]:
        """Returns [arms], the same without the positions that the current arm's steps observe."""
        arm, variances = self._arms[current_arm], self._variances.copy()
        first = self._first_positions[arm.drafter]
        variances[first : first + arm.gamma] = 0.0
        difference = self._slopes - self._slopes[current_arm]
        state_variances = self._state_variances([current_arm])
        unobserved: NDArray[np.float64] = difference**2 @ variances
        unobserved += np.reshape(state_variances, -1)
        return unobserved

    def _state_variances(self, current_arms: Sequence[int]) -> NDArray[np.float64] | float:
        """Returns [arms, current_arms], the part that the uncertainty of the traffic state adds."""
        log_tokens, probabilities = self._log_tokens_by_state, self._traffic.state_probabilities
        if log_tokens is None or probabilities is None:
            return 0.0
        # [arms, current_arms, states]
        difference = log_tokens.T[:, None] - log_tokens.T[current_arms]
        weights = probabilities[self._traffic.octave]
        variances: NDArray[np.float64] = difference**2 @ weights - (difference @ weights) ** 2
        return np.maximum(variances, 0.0)
