"""Drafter confidences: what the drafter thinks of its drafts, corrected by what became of them.

    logit(a_k) = logit(mean confidence_k) + offset

One offset per drafter, learnt from the positions whose fate was seen.  A confidence is there for
every drafted position, also for those behind a rejection, so deep positions are not censored.
"""

import math
from collections.abc import Sequence

# How quickly the mean confidences and the offset follow, a step.
_CONFIDENCE_RATE = 0.2
_OFFSET_RATE = 0.05
# Steps with confidences before they are relied on.
_STEPS_MIN = 5
_EDGE = 0.005


def _logit(p: float) -> float:
    p = min(max(p, _EDGE), 1 - _EDGE)
    return math.log(p / (1 - p))


class ConfidenceCalibration:
    """Mean confidence by position and its correction.  One object per acceptance estimator."""

    def __init__(self, gamma_max: int) -> None:
        self._means: list[float | None] = [None] * gamma_max
        self._offset = 0.0
        self._steps = 0

    def fold(self, confidences: Sequence[float], accepted_counts: Sequence[int]) -> None:
        """One step: gamma mean confidences in [0, 1], and the step's accepted counts."""
        self._steps += 1
        reached = sum(accepted_counts)
        for k, value in enumerate(confidences[: len(self._means)]):
            old = self._means[k]
            self._means[k] = value if old is None else old + _CONFIDENCE_RATE * (value - old)
            if k >= len(accepted_counts) - 1 or reached == 0:
                continue
            # One step of stochastic gradient on the log-likelihood of what was seen.
            believed = 1 / (1 + math.exp(-(_logit(value) + self._offset)))
            successes = reached - accepted_counts[k]
            rate = _OFFSET_RATE * reached / (reached + 8)
            self._offset += rate * 4 * (successes / reached - believed)
            self._offset = min(4.0, max(-4.0, self._offset))
            reached = successes

    def calibrated(self) -> list[float] | None:
        """a_k for every position, positions never drafted like the deepest one; None: too few."""
        if self._steps < _STEPS_MIN:
            return None
        found: list[float] = []
        for mean in self._means:
            if mean is None:
                found.append(found[-1] if found else 0.5)
            else:
                found.append(1 / (1 + math.exp(-(_logit(mean) + self._offset))))
        return found
