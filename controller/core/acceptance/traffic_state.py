"""Remembers traffic states, so that traffic that returns is recognised and not learnt again.

A state is one kind of traffic: the acceptance of every drafter under it, and the batch sizes at
which it was observed.  The states form a hidden Markov model (Rabiner 1989, the forward recursion):
in every step the traffic changes with probability h, to state k with a probability proportional to
its visits, and a report multiplies the probability of k by its likelihood,

    P_k <- (1 - h) P_k + h visits_k / visits
    P_k <- P_k prod over positions i of p_ki^successes_i (1 - p_ki)^failures_i, then normalised

The likelihood is computed relative to the current state's (`RememberedCurves`).  A position with
little evidence in state k counts less.  When the batch size moves to another octave o, P_k is also
multiplied by P(o | k), because small and large batches often serve different requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.outcome_scores import OutcomeScores
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# Octaves of batch sizes; the last one contains all larger sizes.
OCTAVES = 16
# By position: the acceptance and the trust in it.
ReferenceAcceptance: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class EarlierVisit:
    """Describes the earlier traffic that the present traffic is identified with.

    began_at, ended_at: clock seconds of its last visit.  visits: how often it was current before.
    """

    began_at: float
    ended_at: float
    visits: int


@recorded(
    "traffic_state",
    "visits steps last_step probability",
    drafters="estimators",
    began="began_at",
    ended="ended_at",
    last_began="last_began_at",
    last_ended="last_ended_at",
    octaves="octave_visits",
)
class TrafficState:
    """Holds one kind of traffic.

    began_at, ended_at: clock seconds of the present or last visit; last_began_at, last_ended_at: of
    the visit before (0 and 0: no visit).  steps: reports observed in this state.  last_step:
    number of the last of these, counted over all of the engine's reports.  probability: P_k above.
    """

    def __init__(
        self,
        estimators: Mapping[str, AcceptanceEstimator],
        settings: PlannerSettings,
        now: float = 0.0,
    ) -> None:
        self.estimators = dict(estimators)
        self._settings = settings
        self.began_at = self.ended_at = now
        self.last_began_at = self.last_ended_at = 0.0
        self.visits = 1
        self.octave_visits = [0.0] * OCTAVES
        self.steps = self.last_step = 0
        self.probability = 1.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        for estimator in self.estimators.values():
            estimator.use_settings(settings)

    def count_octave_visit(self, octave: int) -> None:
        """Counts a visit of the batch size to this octave in this state."""
        self.octave_visits[octave] += 1

    def make_current_again(self, now: float) -> None:
        """Makes it the current state again."""
        self.last_began_at, self.last_ended_at = self.began_at, self.ended_at
        self.began_at = self.ended_at = now
        self.visits += 1
        for estimator in self.estimators.values():
            estimator.resume_traffic()

    @property
    def earlier_visit(self) -> EarlierVisit | None:
        """Returns the visit before the present one; None if this is the first."""
        if self.visits < 2:
            return None
        return EarlierVisit(self.last_began_at, self.last_ended_at, self.visits - 1)

    def merge_duplicate(self, duplicate: "TrafficState") -> None:
        """Adds the evidence of a state that turned out to be the same."""
        for name, estimator in self.estimators.items():
            curve = duplicate.estimators[name].curve()
            estimator.warm_start_from(curve.conditional, curve.exposures)
        self.visits += duplicate.visits
        self.octave_visits = [
            a + b for a, b in zip(self.octave_visits, duplicate.octave_visits, strict=True)
        ]

    def octave_probabilities(self) -> list[float]:
        """Returns [octaves], P(octave | this state)."""
        prior_visits = self._settings.octave_prior_visits
        total = sum(self.octave_visits) + prior_visits
        return [(visits + prior_visits / OCTAVES) / total for visits in self.octave_visits]


def octave_of(batch_size: int) -> int:
    """Returns o of the batch sizes 2^(o-1)+1 .. 2^o."""
    return min((batch_size - 1).bit_length(), OCTAVES - 1)


def octaves_of(batch_sizes: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns the octaves of integer batch sizes, in the same shape."""
    # The bit length of an integer is its binary exponent with a mantissa in [1/2, 1).
    return np.minimum(np.frexp(batch_sizes - 1)[1], OCTAVES - 1)


def are_alike(a: TrafficState, b: TrafficState, settings: PlannerSettings) -> bool:
    """Returns whether no drafter observed in both states distinguishes the two."""
    has_compared = False
    for name, estimator in a.estimators.items():
        curve_a, curve_b = estimator.curve(), b.estimators[name].curve()
        min_exposures = min(curve_a.exposures[0], curve_b.exposures[0])
        if min_exposures < settings.alike_exposures_min:
            continue
        has_compared = True
        survival, divergence, total_divergence = 1.0, 0.0, 0.0
        for k, (x, y) in enumerate(zip(curve_a.conditional, curve_b.conditional, strict=True)):
            p, q = clip_acceptance(x, settings), clip_acceptance(y, settings)
            n = min(curve_a.exposures[k], curve_b.exposures[k])
            distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            divergence += survival * distance * evidence_trust(n, settings)
            total_divergence += n * distance
            survival *= p
        if (
            divergence > settings.alike_divergence
            and total_divergence > settings.alike_total_divergence
        ):
            return False
    return has_compared


def clip_acceptance(acceptance: float, settings: PlannerSettings) -> float:
    """Clips an acceptance away from 0 and 1, for the comparison of states."""
    lowest = settings.state_acceptance_min
    return min(max(acceptance, lowest), 1 - lowest)


def evidence_trust(exposures: float, settings: PlannerSettings) -> float:
    """Returns the weight, below 1, of an estimate with this many exposures."""
    return exposures / (exposures + settings.state_half_trust_exposures)


def reference_acceptance(curve: AcceptanceCurve, settings: PlannerSettings) -> ReferenceAcceptance:
    """Returns the current state's baseline of the likelihood ratios of remembered states."""
    positions = zip(curve.conditional, curve.exposures, curve.prior_exposures, strict=True)
    return [
        (clip_acceptance(a, settings), evidence_trust(n + prior, settings))
        for a, n, prior in positions
    ]


class RememberedCurves:
    """Holds values derived from the remembered states' curves, which do not change.

    A report that drafted with s_i successes and f_i failures at position i multiplies the odds of
    state k against the current one by

        prod over positions i of (p_ki / q_i)^(t s_i) ((1 - p_ki) / (1 - q_i))^(t f_i)

    with q_i the current state's acceptance as estimated at the last decision.  The trust t is the
    product of n / (n + `state_half_trust_exposures`), for n exposures of the position in state k,
    and the same factor of the current state, since a state without exposures predicts nothing about
    the position.  A large batch counts as at most `state_sequences_max` sequences, since its
    sequences are alike.

    octave_probabilities: [octaves, states], P(octave | state).
    """

    def __init__(self, states: Sequence[TrafficState], settings: PlannerSettings) -> None:
        self._settings = settings
        self._curves = [
            {name: estimator.curve() for name, estimator in state.estimators.items()}
            for state in states
        ]
        self.octave_probabilities: NDArray[np.float64] = np.array(
            [s.octave_probabilities() for s in states]
        ).T
        # By drafter, see `_log_terms_of`.
        self._log_terms: dict[str, list[list[tuple[float, float, float]]]] = {}
        # By drafter, the current state's acceptance that they were computed with, and the scores.
        self._scores: dict[str, tuple[ReferenceAcceptance, OutcomeScores]] = {}
        self._arms: Sequence[Arm] = ()
        self._expected_accepted = np.zeros((len(states), 0))

    def expected_accepted(self, arms: Sequence[Arm]) -> NDArray[np.float64]:
        """Returns [states, arms], the expected accepted draft tokens of a sequence."""
        if arms is not self._arms:
            self._arms = arms
            self._expected_accepted = np.array(
                [
                    [curves[arm.drafter].expected_accepted[arm.gamma] for arm in arms]
                    for curves in self._curves
                ]
            )
        return self._expected_accepted

    def log_odds(
        self,
        drafter: str,
        reference: ReferenceAcceptance,
        accepted_counts: Sequence[int],
        censored_counts: Sequence[int] = (),
    ) -> list[float]:
        """Returns by state the increment of its log odds from a report of a drafter.

        reference: of the current state.  accepted_counts: gamma + 1 counts of accepted drafts.
        censored_counts: gamma counts as in `AcceptanceEstimator.observe`, or empty.
        """
        known_reference, scores = self._scores.get(drafter, (None, None))
        if scores is None or known_reference is not reference:
            scores = self._compute_scores(drafter, reference)
            self._scores[drafter] = reference, scores
        totals = scores.totals(accepted_counts, censored_counts)
        sequences = sum(accepted_counts) + sum(censored_counts)
        weight = min(1.0, self._settings.state_sequences_max / max(sequences, 1))
        limit = self._settings.state_log_odds_max
        return [max(-limit, min(limit, total * weight)) for total in totals]

    def _compute_scores(self, drafter: str, reference: ReferenceAcceptance) -> OutcomeScores:
        """Returns by state the log odds that each outcome of a sequence adds."""
        reference_logs = [(math.log(q), math.log(1 - q), trust) for q, trust in reference]
        scores = OutcomeScores([], [])
        for log_terms in self._log_terms_of(drafter):
            total, rejected, accepted = 0.0, [], [0.0]
            for (log_p, log_1_p, t), (log_q, log_1_q, trust) in zip(
                log_terms, reference_logs, strict=True
            ):
                rejected.append(total + trust * (log_1_p - t * log_1_q))
                total += trust * (log_p - t * log_q)
                accepted.append(total)
            scores.rejected.append(rejected)
            scores.accepted.append(accepted)
        return scores

    def _log_terms_of(self, drafter: str) -> list[list[tuple[float, float, float]]]:
        """Returns [states][positions] of t log p, t log(1 - p) and t."""
        log_terms = self._log_terms.get(drafter)
        if log_terms is None:
            log_terms = self._log_terms[drafter] = [
                _log_terms_of_curve(by_drafter[drafter], self._settings)
                for by_drafter in self._curves
            ]
        return log_terms


def _log_terms_of_curve(
    curve: AcceptanceCurve, settings: PlannerSettings
) -> list[tuple[float, float, float]]:
    terms = []
    for a, n in zip(curve.conditional, curve.exposures, strict=True):
        p, trust = clip_acceptance(a, settings), evidence_trust(n, settings)
        terms.append((trust * math.log(p), trust * math.log(1 - p), trust))
    return terms
