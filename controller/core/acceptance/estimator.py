"""Estimates acceptance position by position from censored observations.

A step at draft length gamma shows, for every sequence that accepted j drafts, successes at
positions 1..j and a failure at j + 1, but only if j < gamma: what lies beyond is censored, not
rejected.  So each position k keeps its own exposures n_k (sequences that reached k while
k <= gamma) and successes, and a_k = P(k accepted | k - 1 were) = successes / exposures; an average
of accepted / gamma would move whenever gamma does.

Forgetting is by evidence: m new exposures fade the old ones by exp(-m / memory), so that B = 1
and B = 256 track alike; a large batch never forgets more than a fixed share of it in one step.  A
position that a step did not reach keeps its mean and loses confidence, step by step.  There is a
fast and a slow window.  When the fast one leaves the slow one by `shift_z` standard errors, or all
positions together indicate a large change (`shift_alarm`, see `Cusum`), the fast one replaces the
slow one, and the memory starts short again.

A position with little evidence is drawn towards the one before it.  Acceptance by position is a
random walk whose steps have the variance a (1 - a) / W, seen through n_k exposures each (the local
level model of Durbin and Koopman 2012, ch. 2; W = `_WALK_EXPOSURES`).  Its filter is

    a_k = (successes_k + w_k a_{k-1}) / (n_k + w_k)
    1 / w_{k+1} = 1 / (n_k + w_k) + 1 / W

so that a position that was hardly seen sets neither itself nor those behind it.  The first position
is drawn towards a prior, and those of a request class towards all traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.shifts import LARGE, Change, Cusum
from controller.core.engine_spec import MAX_BATCH_SIZE
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# A window needs this many exposures before it can call a shift.
_SHIFT_MIN_EXPOSURES = 8.0
# How much of the fast window is kept when it does.
_SHIFT_KEEP = 0.1
# Exposures that an idle drafter keeps after the traffic has shifted: hardly any.  Drafters differ
# most in the traffic that they are good at; with more the other one would never be tried again.
_DOUBTED_EXPOSURES = 0.1
# What a position tells about the next one if it is known exactly: in exposures, W above.  Two
# neighbours differ by a tenth, as a standard deviation.
_WALK_EXPOSURES = 20.0
# Exposures of a position that count on when its traffic returns.
_RECALLED_EXPOSURES = 200.0


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Holds the estimates of one drafter at one moment.

    conditional, exposures: a_k and the sequences behind it, for k = 1..gamma_max.
    expected: E[accepted | gamma] = s_1 + ... + s_gamma, s_k = a_1 ... a_k, gamma = 0..gamma_max.
    prior_exposures: w_k, what the value that a_k is drawn to counts as.  is_walk: that value is
    a_{k-1}, behind the first position; else it has nothing to do with the other positions.
    """

    conditional: list[float]
    exposures: list[float]
    expected: list[float]
    prior_exposures: list[float]
    is_walk: bool = True

    def variance(self) -> NDArray[np.float64]:
        """Returns [gamma_max], the variance of the estimate of a_k."""
        means = np.array(self.conditional)
        evidence = np.array(self.exposures) + np.array(self.prior_exposures)
        variance: NDArray[np.float64] = means * (1 - means) / evidence
        return variance

    def independent_parts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Splits what is unknown about E[accepted | gamma] into parts that are independent.

        Part k is what a_k does not share with a_{k-1}; it also moves a_{k+1}, a_{k+2} and so on, as
        far as those are drawn to a_k.  Returns [gamma_max + 1, gamma_max], dE[accepted | gamma] /
        d part_k, and [gamma_max], the variance of part k.
        """
        slopes, variance = self.sensitivity(), self.variance()
        if self.is_walk:
            seen, weights = np.array(self.exposures), np.array(self.prior_exposures)
            drawn = weights / (seen + weights)
            for k in range(len(drawn) - 1, 0, -1):
                slopes[:, k - 1] += drawn[k] * slopes[:, k]
            # That of a step of the walk, and of what was seen.
            own = (weights**2 / _WALK_EXPOSURES + seen) / (seen + weights)
            variance[1:] *= own[1:]
        return slopes, variance

    def sensitivity(self) -> NDArray[np.float64]:
        """Returns [gamma_max + 1, gamma_max], dE[accepted | gamma] / da_k.

        It is (s_k + ... + s_gamma) / a_k for k <= gamma, and 0 behind.
        """
        expected = np.array(self.expected)
        tail = np.maximum(expected[:, None] - expected[None, :-1], 0.0)
        slopes: NDArray[np.float64] = tail / np.maximum(np.array(self.conditional), 1e-6)
        return slopes


@recorded(
    "acceptance_estimator",
    "_steps _seen_at",
    fast_exposures="_fast_n",
    fast_successes="_fast_s",
    slow_exposures="_slow_n",
    slow_successes="_slow_s",
    cusums="_alarms",
)
class AcceptanceEstimator:
    """Estimates the conditional acceptance of one drafter, positions 1..gamma_max.

    One object per engine, drafter and request class.  `curve` reads and changes nothing.  changes:
    the kinds of change that are tested for.
    """

    def __init__(
        self, gamma_max: int, settings: PlannerSettings, changes: Sequence[Change] = (LARGE,)
    ) -> None:
        self.changes = changes
        self.gamma_max = gamma_max
        self._fast_n = [0.0] * gamma_max
        self._fast_s = [0.0] * gamma_max
        self._slow_n = [0.0] * gamma_max
        self._slow_s = [0.0] * gamma_max
        # Steps seen, and the step of each position's last exposure: idle evidence fades on reading.
        self._steps = 0
        self._seen_at = [0] * gamma_max
        self._alarms = [Cusum(settings, change) for change in changes]
        self.use_settings(settings)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        self._fast_keeps = _keeps(settings.fast_exposures, settings.fast_steps)
        self._slow_keeps = _keeps(settings.slow_exposures, settings.slow_steps)
        for alarm in self._alarms:
            alarm.use_settings(settings)

    def fold(self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()) -> int:
        """Takes one step's histogram (gamma + 1 counts).

        censored_counts: gamma counts, entry k = sequences of which k drafts were accepted and
        nothing more is known, because no more were drafted or the answer ended; or none.

        Returns 1 when the traffic has shifted to more accepted drafts, -1 to fewer, 0 else.  The
        caller decides what that means: `forget`, or another estimator.
        """
        direction = 0
        if len(accepted_counts) > 1 and self.gamma_max > 0:
            for alarm in self._alarms:
                direction = alarm.fold(accepted_counts, censored_counts) or direction
        return self._fold(accepted_counts, censored_counts, direction)

    def fold_aside(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()
    ) -> None:
        """Takes what the drafter would have given in a step in which others were used.

        accepted_counts: width + 1 counts.  censored_counts: width counts, entry k = sequences of
        which at least k tokens would have been accepted and nothing more is known; or none.  No
        test for a shift sees it.
        """
        self._fold(accepted_counts, censored_counts, 1)

    def _fold(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int], direction: int
    ) -> int:
        """Adds a step to both windows, and returns the direction of a shift (given one: that)."""
        self._steps += 1
        gamma = min(len(accepted_counts) - 1, self.gamma_max)
        steps, seen_at, settings = self._steps, self._seen_at, self._settings
        fast_keeps, slow_keeps = self._fast_keeps, self._slow_keeps
        fast_most, slow_most = len(fast_keeps) - 1, len(slow_keeps) - 1
        fast_n, fast_s, slow_n, slow_s = self._fast_n, self._fast_s, self._slow_n, self._slow_s
        reached = sum(accepted_counts) + sum(censored_counts)
        for k in range(gamma):
            if censored_counts:
                reached -= censored_counts[k]
            if reached == 0:
                break
            successes = reached - accepted_counts[k]
            idle = steps - seen_at[k] - 1
            seen_at[k] = steps
            if idle > 0:
                # Evidence fades by the steps in which the position was not observed.
                keep = math.exp(-idle / settings.idle_steps)
                slow_n[k] *= keep
                slow_s[k] *= keep
            keep = fast_keeps[min(fast_most, reached)]
            fast = fast_n[k] = fast_n[k] * keep + reached
            fast_s[k] = fast_s[k] * keep + successes
            keep = slow_keeps[min(slow_most, reached)]
            slow = slow_n[k] = slow_n[k] * keep + reached
            slow_s[k] = slow_s[k] * keep + successes
            if not direction and fast >= _SHIFT_MIN_EXPOSURES and slow >= 2 * fast:
                slow_mean = slow_s[k] / slow
                apart = fast_s[k] / fast - slow_mean
                variance = max(slow_mean * (1 - slow_mean), 0.01) * (1 / fast + 1 / slow)
                if apart * apart > settings.shift_z**2 * variance:
                    direction = 1 if apart > 0 else -1
            reached = successes
        return direction

    def begin_from(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Adds estimates of another session: a_k and exposures of positions 1.., as far as they go.

        They enter the slow window only, so that the fast one shows if live traffic differs.
        """
        for k, (a, n) in enumerate(zip(conditional, exposures, strict=True)):
            if k < self.gamma_max:
                self._slow_n[k] += n
                self._slow_s[k] += n * a
                self._seen_at[k] = self._steps

    def pass_by(self) -> None:
        """Counts a step that ran without this drafter."""
        self._steps += 1

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

    def successor(self, *, doubted: bool) -> "AcceptanceEstimator":
        """Returns the estimator of the traffic after a shift; this one stays as it is.

        doubted: the drafter was idle, so that its evidence is of the traffic before.
        """
        new = AcceptanceEstimator(self.gamma_max, self._settings, self.changes)
        new._steps, new._seen_at = self._steps, self._seen_at.copy()
        new._fast_n, new._fast_s = self._fast_n.copy(), self._fast_s.copy()
        new._slow_n, new._slow_s = self._slow_n.copy(), self._slow_s.copy()
        if doubted:
            new.doubt()
        else:
            new.forget()
        return new

    def recall(self) -> None:
        """Continues with traffic that has returned after a while: what is new outweighs it soon."""
        for k in range(self.gamma_max):
            self._fast_n[k] = self._fast_s[k] = 0.0
        self._weaken(_RECALLED_EXPOSURES)

    def doubt(self) -> None:
        """Weakens the evidence because the traffic has changed while this drafter was idle."""
        self._weaken(_DOUBTED_EXPOSURES)

    def _weaken(self, exposures: float) -> None:
        """Leaves no position of the slow window more exposures than these."""
        for k in range(self.gamma_max):
            keep = min(1.0, exposures / max(self._slow_n[k], 1e-9))
            self._slow_n[k] *= keep
            self._slow_s[k] *= keep

    def curve(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates.

        parent: the curve of all traffic, towards which a request class's estimates are drawn.
        """
        return self._estimates(parent)[0]

    def believe(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates and tests later steps against them; for a decision."""
        curve, own = self._estimates(parent)
        # A class that differs from all traffic has not shifted: it is tested against itself.
        for alarm in self._alarms:
            alarm.believe(own, curve.exposures)
        return curve

    def _estimates(self, parent: AcceptanceCurve | None) -> tuple[AcceptanceCurve, list[float]]:
        """Returns the curve, and a_k drawn with the weight of the prior only, k = 1..gamma_max."""
        settings, steps = self._settings, self._steps
        mean, prior = settings.prior_acceptance, settings.prior_exposures
        above = None if parent is None else parent.conditional
        weight = prior if above is None else settings.class_exposures
        conditional: list[float] = []
        exposures, weights, expected = [], [], [0.0]
        # Without a parent both are the same.
        own = conditional if above is None else []
        survival, total = 1.0, 0.0
        idle, keep = 0, 1.0
        for k, seen_at in enumerate(self._seen_at):
            if steps - seen_at != idle:
                idle = steps - seen_at
                keep = math.exp(-idle / settings.idle_steps)
            seen, successes = self._slow_n[k] * keep, self._slow_s[k] * keep
            if above is not None:
                mean = above[k]
                own.append((successes + prior * mean) / (seen + prior))
            mean = (successes + weight * mean) / (seen + weight)
            survival *= mean
            total += survival
            conditional.append(mean)
            exposures.append(seen)
            weights.append(weight)
            expected.append(total)
            if above is None:
                known = seen + weight
                weight = known * _WALK_EXPOSURES / (known + _WALK_EXPOSURES)
        curve = AcceptanceCurve(conditional, exposures, expected, weights, above is None)
        return curve, own


@lru_cache(maxsize=8)
def _keeps(exposures: float, steps: float) -> tuple[float, ...]:
    """Returns the share of a window that is kept, by new exposures; the last is for all beyond."""
    most = min(math.ceil(exposures / steps), MAX_BATCH_SIZE)
    return tuple(math.exp(-min(n / exposures, 1 / steps)) for n in range(most + 1))
