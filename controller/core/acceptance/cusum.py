"""Tests sequentially for large changes of acceptance, over all positions together.

Page's cumulative sum (Biometrika 1954), one for better and one for worse:

    W <- max(0, W + sum over k of
                    successes_k log(b_k / a_k) + failures_k log((1 - b_k) / (1 - a_k)))

with a_k as believed and b_k the same moved by `_LOGITS` on the logit scale; W above `shift_alarm`
is a shift.  A window of one position needs a handful of sequences; this needs a draft or two that
go deep where one in ten was accepted.
"""

import math
from collections.abc import Sequence

from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

_LOGITS = 1.5
_FACTOR = math.exp(_LOGITS)
# Exposures with which an estimate counts by half.
_HALF_TRUST = 8.0
# The exposures that a position counts as having before it was ever reached.
_PRIOR_TRUST = 3.0


@recorded("cusum", "_up _down _better _worse")
class Cusum:
    """Keeps both sums of one estimator.  limit: a sum above it is a shift."""

    def __init__(self, gamma_max: int, settings: PlannerSettings) -> None:
        self.limit = settings.shift_alarm
        self._up = [(0.0, 0.0)] * gamma_max
        self._down = [(0.0, 0.0)] * gamma_max
        self._better = 0.0
        self._worse = 0.0

    def believe(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Takes the estimates that the next steps are tested against."""
        self._up, self._down = [], []
        for a, n in zip(conditional, exposures, strict=True):
            p = min(max(a, 0.02), 0.98)
            trust = (n + _PRIOR_TRUST) / (n + _PRIOR_TRUST + _HALF_TRUST)
            # With b = p e^L / (1 - p + p e^L): log((1 - b) / (1 - p)) = -log(1 - p + p e^L).
            better = -trust * math.log(1 + p * (_FACTOR - 1))
            worse = -trust * math.log(1 + p * (1 / _FACTOR - 1))
            self._up.append((better + trust * _LOGITS, better))
            self._down.append((worse - trust * _LOGITS, worse))

    def fold(self, accepted_counts: Sequence[int]) -> int:
        """Takes a step's counts; returns the direction of a shift, 1 (better) or -1, else 0.

        It is one when a sum has passed the limit; both restart then.
        """
        reached = sum(accepted_counts)
        up = down = 0.0
        for k in range(min(len(accepted_counts) - 1, len(self._up))):
            if reached == 0:
                break
            failures = accepted_counts[k]
            reached -= failures
            success, failure = self._up[k]
            up += reached * success + failures * failure
            success, failure = self._down[k]
            down += reached * success + failures * failure
        self._better = max(0.0, self._better + up)
        self._worse = max(0.0, self._worse + down)
        if max(self._better, self._worse) <= self.limit:
            return 0
        direction = 1 if self._better > self._worse else -1
        self._better = self._worse = 0.0
        return direction
