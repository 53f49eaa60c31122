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
exposures each (the local level model of Durbin and Koopman 2012, ch. 2; W = `walk_exposures`).
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
from itertools import accumulate
from operator import mul

from controller.core.acceptance.shifts import LARGE_SHIFT, Cusum, ShiftKind
from controller.core.engine_spec import MAX_BATCH_SIZE
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Holds the estimates of one drafter at one moment.

    conditional, exposures: a_k and the number of sequences it is based on, for k = 1..gamma_max.
    expected_accepted: E[accepted | gamma] = s_1 + ... + s_gamma, s_k = a_1 ... a_k, gamma =
    0..gamma_max. prior_exposures: w_k, the weight of the value that a_k is shrunk towards.
    walk_exposures: W of the random walk over positions; 0: from the second position, the value that
    a_k is shrunk towards is independent of the other positions.
    """

    conditional: list[float]
    exposures: list[float]
    expected_accepted: list[float]
    prior_exposures: list[float]
    walk_exposures: float = 0.0

    def variance(self) -> list[float]:
        """Returns [gamma_max], the variance of the estimate of a_k."""
        positions = zip(self.conditional, self.exposures, self.prior_exposures, strict=True)
        return [a * (1 - a) / (n + weight) for a, n, weight in positions]

    def component_variances(self) -> list[float]:
        """Returns [gamma_max], the variances of the independent parts of the estimates.

        Part k is the part of a_k that is independent of a_{k-1}; it also affects a_{k+1}, a_{k+2}
        and so on, as far as these are shrunk towards a_k.
        """
        variances = self.variance()
        if self.walk_exposures:
            # The variances of the random walk's step and of the observations.
            for k in range(1, len(variances)):
                n, weight = self.exposures[k], self.prior_exposures[k]
                variances[k] *= (weight**2 / self.walk_exposures + n) / (n + weight)
        return variances

    def component_slopes(self) -> list[list[float]]:
        """Returns [gamma_max + 1, gamma_max], d log(1 + E[accepted | gamma]) / d part_k.

        Parts are those of `component_variances`.  dE[accepted | gamma] / da_k is
        (s_k + ... + s_gamma) / a_k for k <= gamma, and 0 for later positions.  A part that moves
        a_k moves a_{k+1} by the weight w_{k+1} / (n_{k+1} + w_{k+1}).
        """
        acceptance = [max(a, 1e-6) for a in self.conditional]
        # Of a position's value in the next position's estimate.
        shares = [0.0] * len(acceptance)
        if self.walk_exposures:
            evidence = zip(self.exposures[1:], self.prior_exposures[1:], strict=True)
            shares[:-1] = [weight / (n + weight) for n, weight in evidence]
        expected_accepted, slopes_by_gamma = self.expected_accepted, []
        for gamma, expected in enumerate(expected_accepted):
            slopes, slope, tokens = [0.0] * len(acceptance), 0.0, 1 + expected
            for k in range(gamma - 1, -1, -1):
                slope = (expected - expected_accepted[k]) / acceptance[k] + shares[k] * slope
                slopes[k] = slope / tokens
            slopes_by_gamma.append(slopes)
        return slopes_by_gamma


@recorded(
    "acceptance_estimator",
    "_steps",
    seen_at="_last_exposure_step",
    fast_exposures="_fast_exposures",
    fast_successes="_fast_successes",
    slow_exposures="_slow_exposures",
    slow_successes="_slow_successes",
    cusums="_cusums",
)
class AcceptanceEstimator:
    """Estimates the conditional acceptance of one drafter, positions 1..gamma_max.

    One object per engine, drafter and request class.  `curve` does not change the state.
    shift_kinds: the kinds of shift to test for.
    """

    def __init__(
        self,
        gamma_max: int,
        settings: PlannerSettings,
        shift_kinds: Sequence[ShiftKind] = (LARGE_SHIFT,),
    ) -> None:
        self.shift_kinds = shift_kinds
        self.gamma_max = gamma_max
        self._fast_exposures = [0.0] * gamma_max
        self._fast_successes = [0.0] * gamma_max
        self._slow_exposures = [0.0] * gamma_max
        self._slow_successes = [0.0] * gamma_max
        # Steps counted, and the step of each position's last exposure: idle evidence fades when it
        # is read.
        self._steps = 0
        self._last_exposure_step = [0] * gamma_max
        self._cusums = [Cusum(settings, shift_kind) for shift_kind in shift_kinds]
        self.use_settings(settings)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        self._fast_decay = _decay_table(settings.fast_exposures, settings.fast_steps)
        self._slow_decay = _decay_table(settings.slow_exposures, settings.slow_steps)
        self._shift_z_squared = settings.shift_z**2
        for cusum in self._cusums:
            cusum.use_settings(settings)

    def observe(self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()) -> int:
        """Adds one step's histogram (gamma + 1 counts).

        censored_counts: empty, or gamma counts, entry k = sequences in which k drafts were accepted
        and later positions are unknown, because no more were drafted or the answer ended.  These
        sequences are not in `accepted_counts`.

        Returns 1 if the traffic has shifted to more accepted drafts, -1 to fewer, otherwise 0.  The
        caller then calls `reset_after_shift` or uses another estimator.
        """
        direction = 0
        if len(accepted_counts) > 1 and self.gamma_max > 0:
            for cusum in self._cusums:
                direction = cusum.observe(accepted_counts, censored_counts) or direction
        return self._add_to_windows(accepted_counts, censored_counts, direction)

    def observe_unused_proposals(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()
    ) -> None:
        """Adds the counts of proposals in a step that used other drafts.

        accepted_counts: length of the proposals + 1 counts.  censored_counts: empty, or as many
        counts as a proposal has tokens, entry k = sequences in which at least k tokens would have
        been accepted and later positions are unknown.  The tests for shifts ignore these counts.
        """
        self._add_to_windows(accepted_counts, censored_counts, 1)

    def _add_to_windows(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int], direction: int
    ) -> int:
        """Adds a step to both windows; returns `direction`.

        If `direction` is 0, returns the direction of a shift found by the windows, or 0.
        """
        previous_step = self._steps
        steps = self._steps = previous_step + 1
        last_exposure_step, shift_z_squared = self._last_exposure_step, self._shift_z_squared
        shift_exposures_min = self._settings.shift_exposures_min
        fast_decay, slow_decay = self._fast_decay, self._slow_decay
        fast_size, slow_size = len(fast_decay), len(slow_decay)
        fast_exposures, fast_successes = self._fast_exposures, self._fast_successes
        slow_exposures, slow_successes = self._slow_exposures, self._slow_successes
        reached_count = sum(accepted_counts) + sum(censored_counts)
        for k in range(min(len(accepted_counts) - 1, self.gamma_max)):
            if censored_counts:
                reached_count -= censored_counts[k]
            if not reached_count:
                break
            if last_exposure_step[k] != previous_step:
                # The slow window fades by the steps in which the position was not observed.
                idle_steps = previous_step - last_exposure_step[k]
                decay = math.exp(-idle_steps / self._settings.idle_steps)
                slow_exposures[k] *= decay
                slow_successes[k] *= decay
            last_exposure_step[k] = steps
            fast_kept = fast_decay[reached_count] if reached_count < fast_size else fast_decay[-1]
            slow_kept = slow_decay[reached_count] if reached_count < slow_size else slow_decay[-1]
            # Sums of floats are faster than sums of floats and integers.
            reached = float(reached_count)
            reached_count -= accepted_counts[k]
            successes = float(reached_count)
            fast_total = fast_exposures[k] = fast_exposures[k] * fast_kept + reached
            fast_successes[k] = fast_successes[k] * fast_kept + successes
            slow_total = slow_exposures[k] = slow_exposures[k] * slow_kept + reached
            slow_successes[k] = slow_successes[k] * slow_kept + successes
            if not direction and fast_total >= shift_exposures_min and slow_total >= 2 * fast_total:
                slow_mean = slow_successes[k] / slow_total
                difference = fast_successes[k] / fast_total - slow_mean
                spread = slow_mean * (1 - slow_mean)
                # The variance is larger than this share of it, which excludes nearly all steps.
                is_doubtful = difference * difference * fast_total > shift_z_squared * spread
                if is_doubtful and difference * difference > shift_z_squared * max(spread, 0.01) * (
                    1 / fast_total + 1 / slow_total
                ):
                    direction = 1 if difference > 0 else -1
        return direction

    def warm_start_from(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Adds another session's estimates: a_k and exposures of positions 1 to at most gamma_max.

        They are added to the slow window only, so that the fast one shows if live traffic differs.
        """
        for k, (a, n) in enumerate(zip(conditional, exposures, strict=True)):
            if k < self.gamma_max:
                self._slow_exposures[k] += n
                self._slow_successes[k] += n * a
                self._last_exposure_step[k] = self._steps

    def observe_idle_step(self) -> None:
        """Counts a step in which this drafter did not run."""
        self._steps += 1

    def reset_after_shift(self) -> None:
        """Keeps a small share of the fast window only, as part of it predates the shift."""
        for k in range(self.gamma_max):
            idle_steps = self._steps - self._last_exposure_step[k]
            self._last_exposure_step[k] = self._steps
            decay = self._settings.shift_kept_share * math.exp(
                -idle_steps / self._settings.fast_steps
            )
            self._fast_exposures[k] *= decay
            self._fast_successes[k] *= decay
        self._slow_exposures = self._fast_exposures.copy()
        self._slow_successes = self._fast_successes.copy()

    def make_successor(self, *, was_idle: bool) -> "AcceptanceEstimator":
        """Returns an estimator for the traffic after a shift; this one does not change.

        was_idle: the drafter was idle, so its evidence predates the shift.
        """
        successor = AcceptanceEstimator(self.gamma_max, self._settings, self.shift_kinds)
        successor._steps, successor._last_exposure_step = (
            self._steps,
            self._last_exposure_step.copy(),
        )
        successor._fast_exposures, successor._fast_successes = (
            self._fast_exposures.copy(),
            self._fast_successes.copy(),
        )
        successor._slow_exposures, successor._slow_successes = (
            self._slow_exposures.copy(),
            self._slow_successes.copy(),
        )
        if was_idle:
            successor.discount_idle_evidence()
        else:
            successor.reset_after_shift()
        return successor

    def resume_traffic(self) -> None:
        """Prepares for traffic that returns: new evidence soon outweighs the old."""
        for k in range(self.gamma_max):
            self._fast_exposures[k] = self._fast_successes[k] = 0.0
        self._cap_slow_exposures(self._settings.resumed_exposures)

    def discount_idle_evidence(self) -> None:
        """Weakens the evidence because the traffic has changed while this drafter was idle."""
        self._cap_slow_exposures(self._settings.shift_idle_exposures)

    def _cap_slow_exposures(self, max_exposures: float) -> None:
        """Limits the exposures of each position of the slow window."""
        for k in range(self.gamma_max):
            kept_share = min(1.0, max_exposures / max(self._slow_exposures[k], 1e-9))
            self._slow_exposures[k] *= kept_share
            self._slow_successes[k] *= kept_share

    def curve(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates.

        parent: the curve of all traffic, towards which a request class's estimates are shrunk.
        """
        return self._compute_curve(parent)[0]

    def commit(self, parent: AcceptanceCurve | None = None) -> AcceptanceCurve:
        """Returns the present estimates, and makes them the reference of the tests for shifts."""
        curve, own_conditional = self._compute_curve(parent)
        # A class that differs from all traffic has not shifted: it is tested against itself.
        for cusum in self._cusums:
            cusum.set_reference(own_conditional, curve.exposures)
        return curve

    def _compute_curve(self, parent: AcceptanceCurve | None) -> tuple[AcceptanceCurve, list[float]]:
        """Returns the curve, and a_k shrunk with `prior_exposures` only, k = 1..gamma_max.

        With a parent, the curve is shrunk towards it with `class_exposures` instead.
        """
        exposures, successes = self._decayed_evidence()
        if parent is None:
            curve = self._walk_over_positions(exposures, successes)
            return curve, curve.conditional
        weight, own_weight = self._settings.class_exposures, self._settings.prior_exposures
        positions = list(zip(exposures, successes, parent.conditional, strict=False))
        conditional = [(s + weight * mean) / (n + weight) for n, s, mean in positions]
        own_conditional = [(s + own_weight * mean) / (n + own_weight) for n, s, mean in positions]
        survival = accumulate(conditional, mul)
        curve = AcceptanceCurve(
            conditional,
            exposures,
            list(accumulate(survival, initial=0.0)),
            [weight] * len(exposures),
        )
        return curve, own_conditional

    def _walk_over_positions(
        self, exposures: list[float], successes: list[float]
    ) -> AcceptanceCurve:
        """Returns the filter of the random walk over positions."""
        mean, weight = self._settings.prior_acceptance, self._settings.prior_exposures
        walk_exposures = self._settings.walk_exposures
        survival, total = 1.0, 0.0
        conditional, weights, expected_accepted = [], [], [0.0]
        for n, s in zip(exposures, successes, strict=True):
            evidence = n + weight
            mean = (s + weight * mean) / evidence
            survival *= mean
            total += survival
            conditional.append(mean)
            weights.append(weight)
            expected_accepted.append(total)
            weight = evidence * walk_exposures / (evidence + walk_exposures)
        return AcceptanceCurve(conditional, exposures, expected_accepted, weights, walk_exposures)

    def _decayed_evidence(self) -> tuple[list[float], list[float]]:
        """Returns the slow window's exposures and successes by position, faded while idle."""
        steps, memory_steps = self._steps, self._settings.idle_steps
        decayed_step, decay = steps, 1.0
        exposures, successes = [], []
        for n, s, last_step in zip(
            self._slow_exposures, self._slow_successes, self._last_exposure_step, strict=True
        ):
            if last_step != decayed_step:
                decayed_step, decay = last_step, math.exp((last_step - steps) / memory_steps)
            exposures.append(n * decay)
            successes.append(s * decay)
        return exposures, successes


@lru_cache(maxsize=8)
def _decay_table(exposures: float, steps: float) -> tuple[float, ...]:
    """Returns the kept share of a window by new exposures; the last entry is for all more."""
    max_exposures = min(math.ceil(exposures / steps), MAX_BATCH_SIZE)
    return tuple(math.exp(-min(n / exposures, 1 / steps)) for n in range(max_exposures + 1))
