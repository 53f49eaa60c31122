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
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded

# States that are remembered in addition to the current one.
MAX_REMEMBERED = 5
# Octaves of batch sizes; the last one contains all larger sizes.
OCTAVES = 16
# A state that has not been current for this many steps is forgotten.
FORGOTTEN_STEPS = 20_000
# Exposures at which a position has half its weight.
_HALF_TRUST = 8.0
_CERTAIN = 0.03
# Prior visits of all octaves together.
_PRIOR_VISITS = 1.0
# Two states are alike if the Kullback-Leibler divergence between them is less than this for one
# sequence, or less than that for all sequences of the state with less evidence.  Only drafters with
# this many exposures in both states are compared.
_ALIKE = 0.03
_ALIKE_TOTAL = 3.0
_COMPARED_EXPOSURES = 16.0
_REPORT_WEIGHT = 16.0
# A report changes the log odds by no more than this.
_SURE = 12.0
# By position: the acceptance and the trust in it.
Believed: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Resemblance:
    """Describes the earlier traffic that the present traffic is identified with.

    began, ended: clock seconds of its last visit.  visits: how often it was current before.
    """

    began: float
    ended: float
    visits: int


@recorded(
    "traffic_state",
    "drafters began ended last_began last_ended visits octaves steps last_step probability",
)
class TrafficState:
    """Holds one kind of traffic.

    began, ended: clock seconds of the present or last visit; last_began, last_ended: of the visit
    before (0 and 0: there was none).  steps: reports observed in this state.  last_step: number of
    the last of these, counted over all of the engine's reports.  probability: P_k above.
    """

    def __init__(self, drafters: Mapping[str, AcceptanceEstimator], now: float = 0.0) -> None:
        self.drafters = dict(drafters)
        self.began = self.ended = now
        self.last_began = self.last_ended = 0.0
        self.visits = 1
        self.octaves = [0.0] * OCTAVES
        self.steps = self.last_step = 0
        self.probability = 1.0

    def enter(self, octave: int) -> None:
        """Counts a visit of the batch size to this octave in this state."""
        self.octaves[octave] += 1

    def return_at(self, now: float) -> None:
        """Makes it the current state again."""
        self.last_began, self.last_ended = self.began, self.ended
        self.began = self.ended = now
        self.visits += 1
        for estimator in self.drafters.values():
            estimator.recall()

    @property
    def resemblance(self) -> Resemblance | None:
        """Returns the visit before the present one; None if this is the first."""
        if self.visits < 2:
            return None
        return Resemblance(self.last_began, self.last_ended, self.visits - 1)

    def absorb(self, other: "TrafficState") -> None:
        """Adds the evidence of a state that turned out to be the same."""
        for name, estimator in self.drafters.items():
            curve = other.drafters[name].curve()
            estimator.begin_from(curve.conditional, curve.exposures)
        self.visits += other.visits
        self.octaves = [a + b for a, b in zip(self.octaves, other.octaves, strict=True)]

    def octave_shares(self) -> list[float]:
        """Returns [octaves], P(octave | this state)."""
        total = sum(self.octaves) + _PRIOR_VISITS
        return [(seen + _PRIOR_VISITS / OCTAVES) / total for seen in self.octaves]


def octave_of(batch_size: int) -> int:
    """Returns o of the batch sizes 2^(o-1)+1 .. 2^o."""
    return min((batch_size - 1).bit_length(), OCTAVES - 1)


def octaves_of(batch_sizes: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns the octaves of integer batch sizes, in the same shape."""
    # The bit length of an integer is its binary exponent with a mantissa in [1/2, 1).
    return np.minimum(np.frexp(batch_sizes - 1)[1], OCTAVES - 1)


def are_alike(a: TrafficState, b: TrafficState) -> bool:
    """Returns whether no drafter observed in both states distinguishes the two."""
    compared = False
    for name, estimator in a.drafters.items():
        one, other = estimator.curve(), b.drafters[name].curve()
        least = min(one.exposures[0], other.exposures[0])
        if least < _COMPARED_EXPOSURES:
            continue
        compared = True
        survival, apart, total = 1.0, 0.0, 0.0
        for k, (x, y) in enumerate(zip(one.conditional, other.conditional, strict=True)):
            p, q = bounded(x), bounded(y)
            n = min(one.exposures[k], other.exposures[k])
            distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            apart += survival * distance * trust_in(n)
            total += n * distance
            survival *= p
        if apart > _ALIKE and total > _ALIKE_TOTAL:
            return False
    return compared


def bounded(p: float) -> float:
    """Clips an acceptance away from 0 and 1, for the comparison of states."""
    return min(max(p, _CERTAIN), 1 - _CERTAIN)


def trust_in(exposures: float) -> float:
    """Returns the weight, below 1, of an estimate with this many exposures."""
    return exposures / (exposures + _HALF_TRUST)


def believed(curve: AcceptanceCurve) -> Believed:
    """Returns the current state's baseline of the likelihood ratios of remembered states."""
    known = zip(curve.conditional, curve.exposures, curve.prior_exposures, strict=True)
    return [(bounded(a), trust_in(n + prior)) for a, n, prior in known]


class RememberedCurves:
    """Holds values derived from the remembered states' curves, which do not change.

    A report that drafted with s_i successes and f_i failures at position i multiplies the odds of
    state k against the current one by

        prod over positions i of (p_ki / q_i)^(t s_i) ((1 - p_ki) / (1 - q_i))^(t f_i)

    with q_i the current state's acceptance as estimated at the last decision.  The trust t is the
    product of n / (n + 8), for n exposures of the position in state k, and the same factor of the
    current state, since a state without exposures predicts nothing about the position.  A large
    batch counts as at most `_REPORT_WEIGHT` sequences, since its sequences are alike.

    octaves: [octaves, states], P(octave | state).
    """

    def __init__(self, states: Sequence[TrafficState]) -> None:
        self._curves = [
            {name: estimator.curve() for name, estimator in state.drafters.items()}
            for state in states
        ]
        self.octaves: NDArray[np.float64] = np.array([s.octave_shares() for s in states]).T
        # By drafter, [3 * positions, states]: for each position t log p, t log(1 - p) and t.
        self._logs: dict[str, NDArray[np.float64]] = {}
        self._arms: Sequence[Arm] = ()
        self._expected = np.zeros((len(states), 0))

    def expected(self, arms: Sequence[Arm]) -> NDArray[np.float64]:
        """Returns [states, arms], the expected accepted draft tokens of a sequence."""
        if arms is not self._arms:
            self._arms = arms
            self._expected = np.array(
                [[by[arm.drafter].expected[arm.gamma] for arm in arms] for by in self._curves]
            )
        return self._expected

    def log_odds(
        self,
        drafter: str,
        believed: Believed,
        accepted_counts: Sequence[int],
        censored_counts: Sequence[int] = (),
    ) -> list[float]:
        """Returns by state the increment of its log odds from a report of a drafter.

        believed: of the current state.  accepted_counts: gamma + 1 counts of accepted drafts.
        censored_counts: gamma counts as in `AcceptanceEstimator.fold`, or empty.
        """
        sequences = reached = sum(accepted_counts) + sum(censored_counts)
        # Multipliers of each state's log terms.
        factors: list[float] = []
        for k, (failures, (q, trust)) in enumerate(
            zip(accepted_counts[:-1], believed, strict=False)
        ):
            if censored_counts:
                reached -= censored_counts[k]
            if reached == 0:
                break
            reached -= failures
            own = reached * math.log(q) + failures * math.log(1 - q)
            factors += (trust * reached, trust * failures, -trust * own)
        weight = min(1.0, _REPORT_WEIGHT / max(sequences, 1))
        totals: list[float] = (np.array(factors) @ self._logs_of(drafter)[: len(factors)]).tolist()
        return [max(-_SURE, min(_SURE, total * weight)) for total in totals]

    def _logs_of(self, drafter: str) -> NDArray[np.float64]:
        found = self._logs.get(drafter)
        if found is None:
            rows = []
            for by_drafter in self._curves:
                curve = by_drafter[drafter]
                row: list[float] = []
                for a, n in zip(curve.conditional, curve.exposures, strict=True):
                    p, trust = bounded(a), trust_in(n)
                    row += (trust * math.log(p), trust * math.log(1 - p), trust)
                rows.append(row)
            found = self._logs[drafter] = np.array(rows).T.copy()
        return found
