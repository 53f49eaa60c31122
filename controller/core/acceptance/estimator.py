"""Estimates acceptance position by position from censored observations.

A step at draft length gamma shows, for every sequence that accepted j drafts, successes at
positions 1..j and, if j < gamma, a failure at j + 1.  Positions beyond that are censored, not
rejected.  So each position k has its own exposures n_k (sequences that reached k while k <= gamma)
and successes, and a_k = P(k accepted | k - 1 accepted) = successes / exposures.  An average of
accepted / gamma would change whenever gamma does.

Old evidence fades with new evidence: m new exposures reduce the old ones by exp(-m / memory), so
that B = 1 and B = 256 track at the same rate.  One step never removes more than a fixed share,
however large its batch.  A position that a step did not reach keeps its mean and loses confidence.
There is a fast and a slow window.  If they differ by `shift_z` standard errors at a position, or
all positions together indicate a large change (`shift_alarm`, see `Cusum`), the fast window
replaces the slow one, and the memory starts short again.

A position with little evidence is shrunk towards its predecessor.  Acceptance by position is
modelled as a random walk whose steps have the variance a (1 - a) / W, observed through n_k
exposures each (the local level model of Durbin and Koopman 2012, ch. 2; W = `_WALK_EXPOSURES`).
Its filter is

    a_k = (successes_k + w_k a_{k-1}) / (n_k + w_k)
    1 / w_{k+1} = 1 / (n_k + w_k) + 1 / W

so that a sparsely observed position determines neither its own estimate nor those of later
positions.  The first position is shrunk towards a prior, and the positions of a request class
towards the estimates of all traffic.
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

# A window needs this many exposures before it can detect a shift.
_SHIFT_MIN_EXPOSURES = 8.0
# Share of the fast window that is kept after a shift.
_SHIFT_KEEP = 0.1
# Exposures that an idle drafter keeps after a shift of traffic: almost none.  Drafters differ most
# in the traffic that they are good at; with more exposures an idle one would not be tried again.
_DOUBTED_EXPOSURES = 0.1
# Exposures that an exactly known position is worth as evidence about the next one: W above.  The
# standard deviation between two neighbours is then about 0.1.
_WALK_EXPOSURES = 20.0
# Exposures of a position that are kept when its traffic returns.
_RECALLED_EXPOSURES = 200.0


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Holds the estimates of one drafter at one moment.

    conditional, exposures: a_k and the number of sequences it is based on, for k = 1..gamma_max.
    expected: E[accepted | gamma] = s_1 + ... + s_gamma, s_k = a_1 ... a_k, gamma = 0..gamma_max.
    prior_exposures: w_k, the weight of the value that a_k is shrunk towards.  is_walk: from the
    second position, that value is a_{k-1}; otherwise it is independent of the other positions.
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
        """Splits the uncertainty of E[accepted | gamma] into independent parts.

        Part k is the part of a_k that is independent of a_{k-1}; it also affects a_{k+1}, a_{k+2}
        and so on, as far as these are shrunk towards a_k.  Returns [gamma_max + 1, gamma_max],
        dE[accepted | gamma] / d part_k, and [gamma_max], the variance of part k.
        """
        slopes, variance = self.sensitivity(), self.variance()
        if self.is_walk:
            seen, weights = np.array(self.exposures), np.array(self.prior_exposures)
            drawn = weights / (seen + weights)
            for k in range(len(drawn) - 1, 0, -1):
                slopes[:, k - 1] += drawn[k] * slopes[:, k]
            # The variances of the random walk's step and of the observations.
            own = (weights**2 / _WALK_EXPOSURES + seen) / (seen + weights)
            variance[1:] *= own[1:]
        return slopes, variance

    def sensitivity(self) -> NDArray[np.float64]:
        """Returns [gamma_max + 1, gamma_max], dE[accepted | gamma] / da_k.

        It is (s_k + ... + s_gamma) / a_k for k <= gamma, and 0 for later positions.
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

    One object per engine, drafter and request class.  `curve` does not change the state.  changes:
    the kinds of shift to test for.
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
        # Steps counted, and the step of each position's last exposure: idle evidence fades when it
        # is read.
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
        """Adds one step's histogram (gamma + 1 counts).

        censored_counts: empty, or gamma counts, entry k = sequences in which k drafts were accepted
        and later positions are unknown, because no more were drafted or the answer ended.

        Returns 1 if the traffic has shifted to more accepted drafts, -1 to fewer, otherwise 0.  The
        caller then calls `forget` or uses another estimator.
        """
        direction = 0
        if len(accepted_counts) > 1 and self.gamma_max > 0:
            for alarm in self._alarms:
                direction = alarm.fold(accepted_counts, censored_counts) or direction
        return self._fold(accepted_counts, censored_counts, direction)

    def fold_aside(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()
    ) -> None:
        """Adds the counts of proposals in a step that used other drafts.

        accepted_counts: width + 1 counts.  censored_counts: empty, or width counts, entry k =
        sequences in which at least k tokens would have been accepted and later positions are
        unknown.  The tests for shifts ignore these counts.
        """
        self._fold(accepted_counts, censored_counts, 1)

    def _fold(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int], direction: int
    ) -> int:
        """Adds a step to both windows; returns `direction`, or if that is 0, a detected shift's."""
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
        """Adds another session's estimates: a_k and exposures of positions 1 to at most gamma_max.

        They are added to the slow window only, so that the fast one shows if live traffic differs.
        """
        for k, (a, n) in enumerate(zip(conditional, exposures, strict=True)):
            if k < self.gamma_max:
                self._slow_n[k] += n
                self._slow_s[k] += n * a
                self._seen_at[k] = self._steps

    def pass_by(self) -> None:
        """Counts a step in which this drafter did not run."""
        self._steps += 1

    def forget(self) -> None:
        """Keeps a small share of the fast window only, as part of it predates the shift."""
        for k in range(self.gamma_max):
            idle = self._steps - self._seen_at[k]
            self._seen_at[k] = self._steps
            keep = _SHIFT_KEEP * math.exp(-idle / self._settings.fast_steps)
            self._fast_n[k] *= keep
            self._fast_s[k] *= keep
        self._slow_n = self._fast_n.copy()
        self._slow_s = self._fast_s.copy()

    def successor(self, *, doubted: bool) -> "AcceptanceEstimator":
        """Returns an estimator for the traffic after a shift; this one does not change.

        doubted: the drafter was idle, so its evidence predates the shift.
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
        """Prepares for traffic that returns: new evidence soon outweighs the old."""
        for k in range(self.gamma_max):
            self._fast_n[k] = self._fast_s[k] = 0.0
        self._weaken(_RECALLED_EXPOSURES)

    def doubt(self) -> None:
        """Weakens the evidence because the traffic has changed while this drafter was idle."""
        self._weaken(_DOUBTED_EXPOSURES)

    def _weaken(self, exposures: float) -> None:
        """Limits the exposures of each position of the slow window."""
        for k in range(self.gamma_max):
            keep = min(1.0, exposures / max(self._slow_n[k], 1e-9))
            self._slow_n[k] *= keep
            self._slow_s[k] *= keep

    def curve(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates.

        parent: the curve of all traffic, towards which a request class's estimates are shrunk.
        """
        return self._estimates(parent)[0]

    def believe(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates, and makes them the reference of the tests for shifts."""
        curve, own = self._estimates(parent)
        # A class that differs from all traffic has not shifted: it is tested against itself.
        for alarm in self._alarms:
            alarm.believe(own, curve.exposures)
        return curve

    def _estimates(self, parent: AcceptanceCurve | None) -> tuple[AcceptanceCurve, list[float]]:
        """Returns the curve, and a_k shrunk with the prior's weight only, k = 1..gamma_max."""
        settings, steps = self._settings, self._steps
        mean, prior = settings.prior_acceptance, settings.prior_exposures
        above = None if parent is None else parent.conditional
        weight = prior if above is None else settings.class_exposures
        conditional: list[float] = []
        exposures, weights, expected = [], [], [0.0]
        # Without a parent both lists are the same.
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
    """Returns the kept share of a window by new exposures; the last entry is for all more."""
    most = min(math.ceil(exposures / steps), MAX_BATCH_SIZE)
    return tuple(math.exp(-min(n / exposures, 1 / steps)) for n in range(most + 1))
