"""Censored acceptance, position by position.

A step at draft length gamma shows, for every sequence that accepted j drafts, successes at
positions 1..j and a failure at j + 1, but only if j < gamma: what lies beyond is censored, not
rejected.  So each position k keeps its own exposures n_k (sequences that reached k while
k <= gamma) and successes, and a_k = P(k accepted | k - 1 were) = successes / exposures; an average
of accepted / gamma would move whenever gamma does.

Forgetting is by evidence: m new exposures fade the old ones by exp(-m / memory), so that B = 1
and B = 256 track alike.  A position that a step did not reach keeps its mean and loses confidence.
Two windows stand side by side; when the fast one leaves the slow one by `shift_z` standard errors
the slow one is replaced by it, and the memory starts short again.

Positions with little evidence lean on the position before them (the geometric tail, a_k = a_{k-1}),
the first one on a prior.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.settings import PlannerSettings

# A window needs this many exposures before it can call a shift.
_SHIFT_MIN_EXPOSURES = 10.0
# How much of the fast window is kept when it does.
_SHIFT_KEEP = 0.1


class AcceptanceEstimator:
    """Conditional acceptance of one drafter, positions 1..gamma_max.

    One object per engine and drafter; `fold` is the only thing that changes it.
    """

    def __init__(self, gamma_max: int, settings: PlannerSettings) -> None:
        self.gamma_max = gamma_max
        self._settings = settings
        self._fast_n = [0.0] * gamma_max
        self._fast_s = [0.0] * gamma_max
        self._slow_n = [0.0] * gamma_max
        self._slow_s = [0.0] * gamma_max
        self.shifts = 0

    def fold(self, accepted_counts: Sequence[int]) -> None:
        """Takes one step's histogram (gamma + 1 counts; entry j accepted exactly j drafts)."""
        gamma = min(len(accepted_counts) - 1, self.gamma_max)
        batch = reached = sum(accepted_counts)
        settings = self._settings
        for k in range(gamma):
            if reached == 0:
                break
            successes = reached - accepted_counts[k]
            fast_keep = math.exp(-reached / settings.fast_exposures)
            slow_keep = math.exp(-reached / settings.slow_exposures)
            self._fast_n[k] = self._fast_n[k] * fast_keep + reached
            self._fast_s[k] = self._fast_s[k] * fast_keep + successes
            self._slow_n[k] = self._slow_n[k] * slow_keep + reached
            self._slow_s[k] = self._slow_s[k] * slow_keep + successes
            reached = successes
        self._fade(gamma, batch)
        if gamma > 0:
            self._detect_shift(gamma)

    def fade(self, batch_size: int) -> None:
        """A step of `batch_size` sequences that ran without this drafter: evidence grows older."""
        self._fade(0, batch_size)

    def _fade(self, first: int, batch: int) -> None:
        if first >= self.gamma_max:
            return
        fast_keep = math.exp(-batch / self._settings.fast_exposures)
        slow_keep = math.exp(-batch / self._settings.slow_exposures)
        for k in range(first, self.gamma_max):
            self._fast_n[k] *= fast_keep
            self._fast_s[k] *= fast_keep
            self._slow_n[k] *= slow_keep
            self._slow_s[k] *= slow_keep

    def _detect_shift(self, gamma: int) -> None:
        for k in range(gamma):
            fast, slow = self._fast_n[k], self._slow_n[k]
            if fast < _SHIFT_MIN_EXPOSURES or slow < 2 * fast:
                continue
            fast_mean, slow_mean = self._fast_s[k] / fast, self._slow_s[k] / slow
            variance = max(slow_mean * (1 - slow_mean), 0.01) * (1 / fast + 1 / slow)
            if abs(fast_mean - slow_mean) > self._settings.shift_z * math.sqrt(variance):
                # Part of the fast window is from before the shift: it stays as a weak memory.
                self._fast_n = [n * _SHIFT_KEEP for n in self._fast_n]
                self._fast_s = [s * _SHIFT_KEEP for s in self._fast_s]
                self._slow_n = self._fast_n.copy()
                self._slow_s = self._fast_s.copy()
                self.shifts += 1
                return

    def conditional(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(a_k, exposures_k) for k = 1..gamma_max; arrays of gamma_max floats."""
        weight = self._settings.prior_exposures
        parent = self._settings.prior_acceptance
        means = np.empty(self.gamma_max)
        for k in range(self.gamma_max):
            parent = (self._slow_s[k] + weight * parent) / (self._slow_n[k] + weight)
            means[k] = parent
        return means, np.array(self._slow_n)

    def expected_accepted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(mean, optimistic) E[accepted | gamma] for gamma = 0..gamma_max, draft tokens.

        E = s_1 + ... + s_gamma with the survival s_k = a_1 ... a_k; the optimistic one takes every
        a_k at its upper confidence bound.
        """
        means, exposures = self.conditional()
        weight = self._settings.prior_exposures
        error = np.sqrt(means * (1 - means) / (exposures + weight))
        upper = np.minimum(means + self._settings.confidence_z * error, 0.99)
        return _sum_survival(means), _sum_survival(np.maximum(upper, means))


def _sum_survival(conditional: NDArray[np.float64]) -> NDArray[np.float64]:
    expected = np.zeros(len(conditional) + 1)
    np.cumsum(np.cumprod(conditional), out=expected[1:])
    return expected
