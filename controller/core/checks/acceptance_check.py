"""Notices a drafter of which hardly a token was ever accepted: it does not fit its target.

A wrong checkpoint costs no token and fails no request; all that it shows is an acceptance length
that stays close to 1.  So does good traffic that has turned hard, which is no fault: a drafter that
has worked once is never suspected again.

Acceptance is counted position by position, from the first step on.  What was cut by a sequence's
end or by a grammar, or lies behind the draft length, is censored and counts for nothing, so that
short answers do not look like rejections.
"""

import math
from collections.abc import Sequence

# A drafter is suspected while a sequence gains fewer tokens than this in a drafted step.  A wrong
# checkpoint was seen at 1.02 to 1.07; text that is hard to predict leaves a right one above 1.3.
SUSPECT_TOKENS = 1.1
# In a block of drafts of one mean, this many tokens show that the drafter works.  A block at 1.1
# exceeds it by three standard deviations of its first position once in a thousand times.
WORKING_TOKENS = 1.2
# Verified drafts before it is suspected, and the standard errors by which it must be below: a right
# drafter of 1.15 tokens is verified rarely, so that luck would accuse it for long.
_LEAST_DRAFTS = 50
_STANDARD_ERRORS = 2.0
# Verified drafts of a block, and the steps that they must come from: a batch of copies of one
# prompt is no evidence of its size.
_BLOCK_DRAFTS = 100
_BLOCK_STEPS = 10
# Before it is suspected: steps of the engine since it drafted first.
_LEAST_STEPS = 200


class AcceptanceCheck:
    """Counts one drafter of `gamma_max` positions until it has worked.

    drafts, steps: verified drafts, and the steps since the first of them.
    """

    def __init__(self, gamma_max: int) -> None:
        self.has_worked = False
        self.steps = 0
        self._all = _Positions(gamma_max)
        self._block = _Positions(gamma_max)
        self._block_steps = 0

    @property
    def drafts(self) -> int:
        """Returns how many drafts were verified."""
        return self._all.exposures[0]

    @property
    def tokens(self) -> float:
        """Returns the tokens that a sequence gained in a drafted step so far, bonus included."""
        return self._all.tokens

    @property
    def is_suspect(self) -> bool:
        """Returns whether it has drafted for long and was hardly ever right."""
        return (
            not self.has_worked
            and self.steps >= _LEAST_STEPS
            and self.drafts >= _LEAST_DRAFTS
            and self.tokens + _STANDARD_ERRORS * self._error < SUSPECT_TOKENS
        )

    @property
    def _error(self) -> float:
        """Returns the standard error of `tokens`: as of rare events, of which one more may come."""
        return math.sqrt((self.tokens - 1 + 1 / self.drafts) / self.drafts)

    def fold(self, accepted_counts: Sequence[int], censored_counts: Sequence[int]) -> None:
        """Takes a step in which it drafted; counts as in `AcceptanceEstimator.fold`."""
        self._all.add(accepted_counts, censored_counts)
        block = self._block
        block.add(accepted_counts, censored_counts)
        self._block_steps += 1
        if block.exposures[0] >= _BLOCK_DRAFTS and self._block_steps >= _BLOCK_STEPS:
            self.has_worked = block.tokens >= WORKING_TOKENS
            self._block = _Positions(len(block.exposures))
            self._block_steps = 0

    def pass_step(self) -> None:
        """Counts a step of the engine, whether or not it drafted in it."""
        if self.drafts:
            self.steps += 1


class _Positions:
    """Counts by position the sequences that reached it, and of how many it was accepted."""

    def __init__(self, gamma_max: int) -> None:
        self.exposures = [0] * gamma_max
        self._successes = [0] * gamma_max

    def add(self, accepted_counts: Sequence[int], censored_counts: Sequence[int]) -> None:
        reached = sum(accepted_counts) + sum(censored_counts)
        for k in range(min(len(accepted_counts) - 1, len(self.exposures))):
            if censored_counts:
                reached -= censored_counts[k]
            successes = reached - accepted_counts[k]
            self.exposures[k] += reached
            self._successes[k] += successes
            if not successes:
                break
            reached = successes

    @property
    def tokens(self) -> float:
        """Returns 1 + s_1 + s_2 + ..., as far as anything is known."""
        survival, total = 1.0, 1.0
        for reached, successes in zip(self.exposures, self._successes, strict=True):
            if not successes:
                break
            survival *= successes / reached
            total += survival
        return total
