"""Censored acceptance, position by position.

A step at draft length gamma shows, for every sequence that accepted j drafts, successes at
positions 1..j and a failure at j + 1, but only if j < gamma: what lies beyond is censored, not
rejected.  So each position k keeps its own exposures n_k (sequences that reached k while
k <= gamma) and successes, and a_k = P(k accepted | k - 1 were) = successes / exposures; an average
of accepted / gamma would move whenever gamma does.

Forgetting is by evidence: m new exposures fade the old ones by exp(-m / memory), so that B = 1
and B = 256 track alike; a large batch never forgets more than a fixed share of it in one step.  A
position that a step did not reach keeps its mean and loses confidence, step by step.  Two windows
stand side by side; when the fast one leaves the slow one by `shift_z` standard errors, or all
positions together speak for a large change (`shift_alarm`), the slow one is replaced by it, and the
memory starts short again.

Positions with little evidence lean on a parent: the drafter's own calibrated confidence where the
engine reports it, else the position before them (the geometric tail, a_k = a_{k-1}), the first one
a prior.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.confidence import ConfidenceCalibration
from controller.core.acceptance.cusum import Cusum
from controller.core.settings import PlannerSettings
from controller.core.types import MAX_BATCH_SIZE

# A window needs this many exposures before it can call a shift.
_SHIFT_MIN_EXPOSURES = 8.0
# How much of the fast window is kept when it does.
_SHIFT_KEEP = 0.1
# What an idle drafter's evidence is worth after the traffic has shifted: next to nothing.  Drafters
# differ most in what traffic they are good at; with more the other one is never tried again.
_DOUBTED_EXPOSURES = 0.1
# A calibrated confidence is worth so many exposures.
_CONFIDENCE_WEIGHT = 12.0


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """What is known of one drafter at one moment.

    conditional, exposures: a_k and the sequences behind it, for k = 1..gamma_max.
    expected: E[accepted | gamma] = s_1 + ... + s_gamma, s_k = a_1 ... a_k, gamma = 0..gamma_max.
    prior_exposures: what a position is worth before it was ever seen.
    """

    conditional: list[float]
    exposures: list[float]
    expected: list[float]
    prior_exposures: float

    def variance(self) -> NDArray[np.float64]:
        """[gamma_max] variance of the estimate of a_k."""
        means = np.array(self.conditional)
        evidence = np.array(self.exposures) + self.prior_exposures
        variance: NDArray[np.float64] = means * (1 - means) / evidence
        return variance

    def sensitivity(self) -> NDArray[np.float64]:
        """[gamma_max + 1, gamma_max] of dE[accepted | gamma] / da_k.

        It is (s_k + ... + s_gamma) / a_k for k <= gamma, and 0 behind.
        """
        expected = np.array(self.expected)
        tail = np.maximum(expected[:, None] - expected[None, :-1], 0.0)
        slopes: NDArray[np.float64] = tail / np.maximum(np.array(self.conditional), 1e-6)
        return slopes


class AcceptanceEstimator:
    """Conditional acceptance of one drafter, positions 1..gamma_max.

    One object per engine, drafter and request class.  `curve` reads and changes nothing.
    """

    def __init__(
        self,
        gamma_max: int,
        settings: PlannerSettings,
    ) -> None:
        self.gamma_max = gamma_max
        self._fast_n = [0.0] * gamma_max
        self._fast_s = [0.0] * gamma_max
        self._slow_n = [0.0] * gamma_max
        self._slow_s = [0.0] * gamma_max
        # Steps seen, and the step of each position's last exposure: idle evidence fades on reading.
        self._steps = 0
        self._seen_at = [0] * gamma_max
        self._confidence = ConfidenceCalibration(gamma_max)
        self._alarm = Cusum(gamma_max, settings)
        self.shifts = 0
        self.use_settings(settings)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Forgets and doubts by these from now on; the evidence stays."""
        self._settings = settings
        self._fast_keeps = _keeps(settings.fast_exposures, settings.fast_steps)
        self._slow_keeps = _keeps(settings.slow_exposures, settings.slow_steps)
        self._alarm.limit = settings.shift_alarm

    def fold(self, accepted_counts: Sequence[int], confidences: Sequence[float] = ()) -> bool:
        """Takes one step's histogram (gamma + 1 counts); True when the traffic has shifted.

        confidences: gamma floats, the drafter's own mean probability of what it drafted.
        """
        self._steps += 1
        z = self._settings.shift_z
        gamma = min(len(accepted_counts) - 1, self.gamma_max)
        reached = sum(accepted_counts)
        shifted = gamma > 0 and self._alarm.fold(accepted_counts)
        fast_keeps, slow_keeps = self._fast_keeps, self._slow_keeps
        fast_most, slow_most = len(fast_keeps) - 1, len(slow_keeps) - 1
        fast_n, fast_s, slow_n, slow_s = self._fast_n, self._fast_s, self._slow_n, self._slow_s
        for k in range(gamma):
            if reached == 0:
                break
            successes = reached - accepted_counts[k]
            self._wake(k)
            keep = fast_keeps[min(fast_most, reached)]
            fast = fast_n[k] = fast_n[k] * keep + reached
            fast_s[k] = fast_s[k] * keep + successes
            keep = slow_keeps[min(slow_most, reached)]
            slow = slow_n[k] = slow_n[k] * keep + reached
            slow_s[k] = slow_s[k] * keep + successes
            if fast >= _SHIFT_MIN_EXPOSURES and slow >= 2 * fast:
                slow_mean = slow_s[k] / slow
                apart = fast_s[k] / fast - slow_mean
                variance = max(slow_mean * (1 - slow_mean), 0.01) * (1 / fast + 1 / slow)
                shifted = shifted or apart * apart > z * z * variance
            reached = successes
        if confidences:
            self._confidence.fold(confidences, accepted_counts)
        if not shifted:
            return False
        self.forget()
        self.shifts += 1
        return True

    def begin_from(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Adds what was known elsewhere; a_k and exposures of positions 1.., as far as they go.

        Only to the slow window: where live traffic differs, the fast one tells as always.
        """
        for k, (a, n) in enumerate(zip(conditional, exposures, strict=True)):
            if k < self.gamma_max:
                self._slow_n[k] += n
                self._slow_s[k] += n * a
                self._seen_at[k] = self._steps

    def pass_by(self) -> None:
        """A step that ran without this drafter."""
        self._steps += 1

    def _wake(self, k: int) -> None:
        """Fades what a position knew by the steps in which it was not seen."""
        idle = self._steps - self._seen_at[k] - 1
        self._seen_at[k] = self._steps
        if idle > 0:
            keep = math.exp(-idle / self._settings.idle_steps)
            self._slow_n[k] *= keep
            self._slow_s[k] *= keep

    def forget(self) -> None:
        """Keeps a weak memory of the fast window only (part of it is from before the shift)."""
        for k in range(self.gamma_max):
            idle = self._steps - self._seen_at[k]
            self._seen_at[k] = self._steps
            keep = _SHIFT_KEEP * math.exp(-idle / self._settings.fast_steps)
            self._fast_n[k] *= keep
            self._fast_s[k] *= keep
        self._slow_n = self._fast_n.copy()
        self._slow_s = self._fast_s.copy()

    def doubt(self) -> None:
        """The traffic has changed while this drafter stood by: its means stay, weakly."""
        for k in range(self.gamma_max):
            keep = min(1.0, _DOUBTED_EXPOSURES / max(self._slow_n[k], 1e-9))
            self._slow_n[k] *= keep
            self._slow_s[k] *= keep

    def curve(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """The estimates as they stand.

        parent: the curve of all traffic, on which a request class's estimates lean.
        """
        return self._estimates(parent)[0]

    def believe(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """As `curve`, for a decision: from now on steps are tested against these estimates."""
        curve, own = self._estimates(parent)
        # A class that differs from all traffic has not shifted: it is tested against itself.
        self._alarm.believe(own, curve.exposures)
        return curve

    def _estimates(self, parent: AcceptanceCurve | None) -> tuple[AcceptanceCurve, list[float]]:
        """The curve, and a_k with the weight of the prior only, for k = 1..gamma_max."""
        settings = self._settings
        above = None if parent is None else parent.conditional
        trusted = self._confidence.calibrated()
        mean, weight = settings.prior_acceptance, settings.prior_exposures
        if above is not None:
            weight = settings.class_exposures
        elif trusted is not None:
            above, weight = trusted, _CONFIDENCE_WEIGHT
        conditional, exposures, expected, own = [], [], [0.0], []
        survival, total = 1.0, 0.0
        for k in range(self.gamma_max):
            idle = self._steps - self._seen_at[k]
            keep = math.exp(-idle / settings.idle_steps) if idle else 1.0
            seen = self._slow_n[k] * keep
            leaning = mean if above is None else above[k]
            mean = (self._slow_s[k] * keep + weight * leaning) / (seen + weight)
            prior = settings.prior_exposures
            own.append((self._slow_s[k] * keep + prior * leaning) / (seen + prior))
            survival *= mean
            total += survival
            conditional.append(mean)
            exposures.append(seen)
            expected.append(total)
        curve = AcceptanceCurve(conditional, exposures, expected, settings.prior_exposures)
        return curve, own


@lru_cache(maxsize=8)
def _keeps(exposures: float, steps: float) -> tuple[float, ...]:
    """What is kept of a window after so many new exposures; the last entry is for all beyond."""
    most = min(math.ceil(exposures / steps), MAX_BATCH_SIZE)
    return tuple(math.exp(-min(n / exposures, 1 / steps)) for n in range(most + 1))
