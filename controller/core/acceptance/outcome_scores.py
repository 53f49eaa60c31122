"""Sums the scores of tests that judge every position of a draft, with one product per count.

A test gives each accepted draft token at position k the score a_k and each rejected one r_k.  So a
sequence has a score that depends only on its outcome,

    a_1 + ... + a_j + r_{j+1}   if j tokens were accepted and the next one was rejected
    a_1 + ... + a_j             if j tokens were accepted and nothing is known about the next one

and a report's total is the sum over outcomes of their counts times these scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul


@dataclass(slots=True)
class OutcomeScores:
    """Holds the scores of all outcomes, of one or more tests.

    rejected: [tests][positions], the sums with r_{j+1} above, for j = 0..positions - 1.  accepted:
    [tests][positions + 1], those without it, for j = 0..positions.
    """

    rejected: list[list[float]]
    accepted: list[list[float]]

    def totals(
        self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()
    ) -> list[float]:
        """Returns the total of each test over a report's sequences.

        accepted_counts, censored_counts: as in `AcceptanceEstimator.observe`.  Positions beyond
        those of the tests have no score.
        """
        gamma = len(accepted_counts) - 1
        if gamma > len(self.rejected[0]):
            gamma = len(self.rejected[0])
            unscored = sum(accepted_counts[gamma:]) + sum(censored_counts[gamma:])
            accepted_counts = (*accepted_counts[:gamma], unscored)
            censored_counts = censored_counts[:gamma]
        rejected_counts, last_count = accepted_counts[:-1], accepted_counts[-1]
        totals = [
            sum(map(mul, rejected_counts, rejected)) + last_count * accepted[gamma]
            for rejected, accepted in zip(self.rejected, self.accepted, strict=True)
        ]
        if censored_counts:
            totals = [
                total + sum(map(mul, censored_counts, accepted))
                for total, accepted in zip(totals, self.accepted, strict=True)
            ]
        return totals
