"""Works out what a report and a batch size say for each of the remembered traffic states.

A report that drafted with s_i successes and f_i failures at position i multiplies the odds of state
k against the current one by

    prod over positions i of (p_ki / q_i)^(t s_i) ((1 - p_ki) / (1 - q_i))^(t f_i)

with q_i the current state's acceptance as it was believed at the last decision.  The trust t is the
product of n / (n + 8), for n exposures of the position in state k, and the same of the current
state: one that has not seen the position predicts nothing that an outcome could refute.  A large
batch counts as `_REPORT_WEIGHT` sequences at most, since its sequences are alike.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve
from controller.core.acceptance.traffic_state import TrafficState, bounded, trust_in
from controller.core.engine_spec import Arm

_REPORT_WEIGHT = 16.0
# A report changes the odds by no more than this.
_SURE = 12.0

# By position: the acceptance, and the trust in it.
Believed: TypeAlias = Sequence[tuple[float, float]]


def believed(curve: AcceptanceCurve) -> Believed:
    """Returns what reports weigh the remembered states against, while this is the current one."""
    known = zip(curve.conditional, curve.exposures, curve.prior_exposures, strict=True)
    return [(bounded(a), trust_in(n + prior)) for a, n, prior in known]


class RememberedCurves:
    """Holds what follows from the remembered states' curves, which stay as they are.

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
        """Returns [states, arms] draft tokens that are accepted of a sequence."""
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
        """Returns by state what a report of a drafter adds to the log of its odds.

        believed: of the current state.  accepted_counts: gamma + 1 counts of accepted drafts.
        censored_counts: gamma counts, as `AcceptanceEstimator.fold` takes them, or none.
        """
        sequences = reached = sum(accepted_counts) + sum(censored_counts)
        # What each of a state's logs is multiplied with.
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
