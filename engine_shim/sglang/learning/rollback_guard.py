"""Are a drafter's weights worse than they were?  By the acceptance of first draft positions.

    before the first update     a baseline is measured; nothing is learnt yet, unless nothing is
                                drafted either: then what was learnt meanwhile is the baseline
    then, every 400 drafts      (and at once when acceptance collapses) against the last good ones
    while updates rest          the same, but no more will come of these weights: they are looked at
                                until they have risen or fallen by a standard error, or for 1600
                                drafts, and go if they have fallen.  A trial of updates that harmed
                                leaves no weights behind
    after a fall                a baseline again, the longer the more often nothing good came of it

First positions, because their acceptance does not depend on how many are drafted.
"""

from __future__ import annotations

from enum import Enum
from math import sqrt
from typing import Final

# First positions drafted between two judgements.
_EVERY: Final = 400
# Of the first baseline.
_BASELINE: Final = 200
# The fewest that anything is judged by, and that the newest weights are seen in before they count
# as good: so many show a collapse.
_LEAST: Final = 50
_LEAST_OF_NEWEST: Final = 24
# What is still open then counts as good; while updates rest, as what it seems to be.
_MOST: Final = 4000
_MOST_AT_REST: Final = 1600
_MOST_DOUBLINGS: Final = 6
# Standard errors: a smaller fall is noise, a larger one is a fall; between them more steps are
# observed, so that many small falls do not pass one by one.
_NO_FALL: Final = 1.0
_LIMIT: Final = 3.0
# The same after every step in between: many looks, so it takes more.
_EARLY_LIMIT: Final = 5.0


class GuardVerdict(Enum):
    """Names what is to be done."""

    NONE = "nothing to say yet"
    GOOD = "keep these weights"
    WORSE = "the last good weights again"


class Acceptance:
    """Counts the acceptance of first draft positions."""

    def __init__(self) -> None:
        self.successes = self.trials = 0

    def add(self, successes: int, trials: int) -> None:
        """Adds one step."""
        self.successes += successes
        self.trials += trials

    def without(self, part: Acceptance) -> Acceptance:
        """Returns what remains of this without a part of it."""
        found = Acceptance()
        found.add(self.successes - part.successes, self.trials - part.trials)
        return found

    @property
    def rate(self) -> float:
        """Share of them that were accepted; 0 of none."""
        return self.successes / self.trials if self.trials else 0.0

    def fell_from(self, before: Acceptance) -> float:
        """Returns by how many standard errors the rate has fallen; 0 without any trial."""
        if not self.trials or not before.trials:
            return 0.0
        both = (self.successes + before.successes) / (self.trials + before.trials)
        variance = both * (1 - both) * (1 / self.trials + 1 / before.trials)
        return (before.rate - self.rate) / sqrt(variance) if variance else 0.0


class RollbackGuard:
    """Judges new weights.

    before: acceptance of the last good weights; found: of those that are served.
    """

    def __init__(self) -> None:
        self.before = Acceptance()
        self.found = Acceptance()
        # Of `found`, those since the last update.
        self._newest = Acceptance()
        # Drafts still to be seen, with weights that are good, before anything is learnt.
        self.hold = _BASELINE
        self._due = _EVERY
        self._updated = False
        self._falls = 0

    @property
    def may_learn(self) -> bool:
        """Whether there is something to compare with, and no verdict waits for newer drafts."""
        return not self.hold and not (self._is_due and self._waits_for_newest)

    @property
    def knows_nothing(self) -> bool:
        """Whether no weights have been judged yet, so that there is nothing to spoil."""
        return not self.before.trials

    @property
    def unjudged(self) -> bool:
        """Whether weights are served that nobody has spoken for yet."""
        return self._updated

    def updated(self) -> None:
        """The weights have changed by learning; drafts until then were the good ones'."""
        self._newest = Acceptance()
        if not self._updated:
            self._updated = True
            if self.hold:
                self._look_on()
                return
            self.before.add(self.found.successes, self.found.trials)
            self._look_on()

    def restart(self) -> None:
        """Other weights are served, by no learning: they are the good ones now."""
        self._look_on()
        self._updated = False

    def forget(self) -> None:
        """Starts over with weights about which nothing is known."""
        self.restart()
        self.before, self.hold = Acceptance(), _BASELINE

    def add(self, successes: int, trials: int, *, rests: bool = False) -> GuardVerdict:
        """One step's first drafts.  rests: no updates are asked for."""
        self.found.add(successes, trials)
        self._newest.add(successes, trials)
        if self.hold:
            return self._baseline(self.found)
        if self._has_collapsed():
            return self._worse()
        if not self._is_due or self._waits_for_newest:
            return GuardVerdict.NONE
        return self._verdict(self.found, rests=rests)

    def _verdict(self, found: Acceptance, *, rests: bool) -> GuardVerdict:
        """Judges by as many drafts as are due."""
        fall = found.fell_from(self.before) if self._updated else 0.0
        at_rest = rests and self._updated
        most = _MOST_AT_REST if at_rest else _MOST
        is_last = found.trials >= most
        bound = 0.0 if is_last else _NO_FALL
        if fall > (bound if at_rest else _LIMIT):
            return self._worse()
        if fall > (-_NO_FALL if at_rest else _NO_FALL) and not is_last:
            self._due += _EVERY
            return GuardVerdict.NONE
        if not self._updated or fall <= 0 or is_last:
            self.before = found
        self._look_on()
        if not self._updated:
            return GuardVerdict.NONE
        self._updated, self._falls = False, 0
        return GuardVerdict.GOOD

    @property
    def _is_due(self) -> bool:
        return self.found.trials >= self._due

    @property
    def _waits_for_newest(self) -> bool:
        """Whether an update has landed so recently that nothing is known about it."""
        return self._updated and self._newest.trials < _LEAST_OF_NEWEST

    def _has_collapsed(self) -> bool:
        """Whether acceptance fell so far, at all or by the last update, that few drafts show it."""
        found, newest, before = self.found, self._newest, self.before
        if not self._updated or found.trials < _LEAST:
            return False
        if found.fell_from(before) > _EARLY_LIMIT:
            return True
        # The drafts between the good weights and the newest may have been better than either.
        earlier = found.without(newest)
        best = earlier if earlier.rate > before.rate else before
        return (
            newest.trials >= _LEAST_OF_NEWEST
            # Of so few drafts near certainty, chance alone is many standard errors.
            and newest.rate < best.rate / 2
            and newest.fell_from(best) > _EARLY_LIMIT
        )

    def _baseline(self, found: Acceptance) -> GuardVerdict:
        if found.trials < self.hold:
            return GuardVerdict.NONE
        # What was learnt without a baseline has become it.
        learnt, self._updated = self._updated, False
        self.before, self.hold = found, 0
        self._look_on()
        return GuardVerdict.GOOD if learnt else GuardVerdict.NONE

    def _look_on(self) -> None:
        self.found, self._newest, self._due = Acceptance(), Acceptance(), _EVERY

    def _worse(self) -> GuardVerdict:
        """`before` and `found` stay until `restart`, for whoever tells about it."""
        self.hold = _EVERY * 2 ** min(self._falls, _MOST_DOUBLINGS)
        self._falls += 1
        return GuardVerdict.WORSE
