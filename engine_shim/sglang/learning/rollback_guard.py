"""Judges whether updates made a drafter worse, by the acceptance of first draft positions.

    before the first update     Measures a baseline.  Nothing is learnt in this time, unless nothing
                                is drafted either; then the learnt weights become the baseline.
    then, every 400 drafts      Compares with the last good weights; at once if acceptance
                                collapses.
    while updates rest          Does the same until acceptance has risen or fallen by one standard
                                error, or for 1600 drafts.  If it has fallen, the weights are
                                rejected, so that a harmful trial of updates leaves no weights.
    after a fall                Measures a baseline again; longer after each further fall without a
                                good verdict in between.

First positions are counted because their acceptance does not depend on the draft length.
"""

from __future__ import annotations

from enum import Enum
from math import sqrt
from typing import Final

# First positions drafted between two judgements.
_EVERY: Final = 400
# Drafts of the first baseline.
_BASELINE: Final = 200
# The fewest drafts for any judgement, and the fewest drafts of the newest weights before they count
# as good.  So many suffice to show a collapse.
_LEAST: Final = 50
_LEAST_OF_NEWEST: Final = 24
# After so many drafts an undecided case counts as good.  While updates rest, the sign of the
# difference decides.
_MOST: Final = 4000
_MOST_AT_REST: Final = 1600
_MOST_DOUBLINGS: Final = 6
# Standard errors.  A fall below the first limit is noise, a fall above the second one is real.  In
# between more steps are observed, so that a series of small falls is not accepted.
_NO_FALL: Final = 1.0
_LIMIT: Final = 3.0
# The limit for the test after every step; it is higher because the test is repeated often.
_EARLY_LIMIT: Final = 5.0


class GuardVerdict(Enum):
    """The verdict on the weights."""

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
        """Returns the counts without those of `part`."""
        found = Acceptance()
        found.add(self.successes - part.successes, self.trials - part.trials)
        return found

    @property
    def rate(self) -> float:
        """Returns the share of accepted drafts; 0 without drafts."""
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

    before: acceptance of the last good weights; found: acceptance of the serving weights.
    """

    def __init__(self) -> None:
        self.before = Acceptance()
        self.found = Acceptance()
        # The part of `found` since the last update.
        self._newest = Acceptance()
        # Drafts with good weights that must be observed before anything is learnt.
        self.hold = _BASELINE
        self._due = _EVERY
        self._updated = False
        self._falls = 0

    @property
    def may_learn(self) -> bool:
        """Whether there is a baseline, and no due verdict waits for newer drafts."""
        return not self.hold and not (self._is_due and self._waits_for_newest)

    @property
    def knows_nothing(self) -> bool:
        """Whether no weights have been judged yet."""
        return not self.before.trials

    @property
    def unjudged(self) -> bool:
        """Whether the serving weights have not been judged yet."""
        return self._updated

    def updated(self) -> None:
        """Must be called after an update; earlier drafts count for the good weights."""
        self._newest = Acceptance()
        if not self._updated:
            self._updated = True
            if self.hold:
                self._look_on()
                return
            self.before.add(self.found.successes, self.found.trials)
            self._look_on()

    def restart(self) -> None:
        """Must be called when other weights serve without an update; they count as good."""
        self._look_on()
        self._updated = False

    def forget(self) -> None:
        """Starts again with weights of unknown acceptance."""
        self.restart()
        self.before, self.hold = Acceptance(), _BASELINE

    def add(self, successes: int, trials: int, *, rests: bool = False) -> GuardVerdict:
        """Adds one step's first drafts.  rests: whether updates rest."""
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
        """Judges when enough drafts were observed."""
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
        """Whether the newest update has too few drafts to be judged."""
        return self._updated and self._newest.trials < _LEAST_OF_NEWEST

    def _has_collapsed(self) -> bool:
        """Whether acceptance has collapsed, since the good weights or by the last update."""
        found, newest, before = self.found, self._newest, self.before
        if not self._updated or found.trials < _LEAST:
            return False
        if found.fell_from(before) > _EARLY_LIMIT:
            return True
        # Drafts between the good and the newest weights may have had a higher rate than both.
        earlier = found.without(newest)
        best = earlier if earlier.rate > before.rate else before
        return (
            newest.trials >= _LEAST_OF_NEWEST
            # With few drafts and a rate near 1, chance alone can be many standard errors.
            and newest.rate < best.rate / 2
            and newest.fell_from(best) > _EARLY_LIMIT
        )

    def _baseline(self, found: Acceptance) -> GuardVerdict:
        if found.trials < self.hold:
            return GuardVerdict.NONE
        # Weights that were learnt before the baseline become the baseline.
        learnt, self._updated = self._updated, False
        self.before, self.hold = found, 0
        self._look_on()
        return GuardVerdict.GOOD if learnt else GuardVerdict.NONE

    def _look_on(self) -> None:
        self.found, self._newest, self._due = Acceptance(), Acceptance(), _EVERY

    def _worse(self) -> GuardVerdict:
        """Rejects the weights; `before` and `found` stay until `restart`, for the log."""
        self.hold = _EVERY * 2 ** min(self._falls, _MOST_DOUBLINGS)
        self._falls += 1
        return GuardVerdict.WORSE
