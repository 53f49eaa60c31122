"""Judges whether updates made a drafter worse, by the acceptance of first draft positions.

    before the first update     Measures a baseline.  Nothing is learnt in this time, unless nothing
                                is drafted either; then the learnt weights become the baseline.
    then, every 400 drafts      Compares with the last good weights; at once if acceptance
                                collapses.
    while updates are paused    Does the same until acceptance has risen or fallen by one standard
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
_JUDGE_EVERY_DRAFTS: Final = 400
# Drafts of the first baseline.
_BASELINE_DRAFTS: Final = 200
# The fewest drafts for any judgement, and the fewest drafts of the newest weights before they count
# as good.  This number suffices to show a collapse.
_MIN_DRAFTS: Final = 50
_MIN_NEWEST_DRAFTS: Final = 24
# After this number of drafts an undecided case counts as good.  While updates are paused, the sign
# of the difference decides.
_MAX_DRAFTS: Final = 4000
_MAX_DRAFTS_AT_REST: Final = 1600
_MAX_HOLD_DOUBLINGS: Final = 6
# Standard errors.  A fall below the first limit is noise, a fall above the second one is real.  In
# between more steps are observed, so that a series of small falls is not accepted.
_NOISE_STANDARD_ERRORS: Final = 1.0
_FALL_STANDARD_ERRORS: Final = 3.0
# The limit for the test after every step; it is higher because the test is repeated often.
_EARLY_FALL_STANDARD_ERRORS: Final = 5.0


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

    def subtract(self, part: Acceptance) -> Acceptance:
        """Returns the counts without those of `part`."""
        remainder = Acceptance()
        remainder.add(self.successes - part.successes, self.trials - part.trials)
        return remainder

    @property
    def rate(self) -> float:
        """Returns the share of accepted drafts; 0 without drafts."""
        return self.successes / self.trials if self.trials else 0.0

    def drop_in_standard_errors(self, earlier: Acceptance) -> float:
        """Returns by how many standard errors the rate has fallen; 0 without any trial."""
        if not self.trials or not earlier.trials:
            return 0.0
        pooled_rate = (self.successes + earlier.successes) / (self.trials + earlier.trials)
        variance = pooled_rate * (1 - pooled_rate) * (1 / self.trials + 1 / earlier.trials)
        return (earlier.rate - self.rate) / sqrt(variance) if variance else 0.0


class RollbackGuard:
    """Judges new weights.

    good: acceptance of the last good weights; current: acceptance of the serving weights.
    """

    def __init__(self) -> None:
        self.good = Acceptance()
        self.current = Acceptance()
        # The part of `current` since the last update.
        self._newest = Acceptance()
        # Drafts with good weights that must be observed before anything is learnt.
        self.hold_drafts = _BASELINE_DRAFTS
        self._due_drafts = _JUDGE_EVERY_DRAFTS
        self._is_unjudged = False
        self._fall_count = 0

    @property
    def can_learn(self) -> bool:
        """Whether there is a baseline, and no due verdict waits for newer drafts."""
        return not self.hold_drafts and not (self._is_due and self._waits_for_newest)

    @property
    def has_no_baseline(self) -> bool:
        """Whether no weights have been judged yet."""
        return not self.good.trials

    @property
    def has_unjudged(self) -> bool:
        """Whether the serving weights have not been judged yet."""
        return self._is_unjudged

    def on_update(self) -> None:
        """Must be called after an update; earlier drafts count for the good weights."""
        self._newest = Acceptance()
        if not self._is_unjudged:
            self._is_unjudged = True
            if self.hold_drafts:
                self._restart_observation()
                return
            self.good.add(self.current.successes, self.current.trials)
            self._restart_observation()

    def on_other_weights(self) -> None:
        """Must be called when other weights serve without an update; they count as good."""
        self._restart_observation()
        self._is_unjudged = False

    def reset(self) -> None:
        """Starts again with weights of unknown acceptance."""
        self.on_other_weights()
        self.good, self.hold_drafts = Acceptance(), _BASELINE_DRAFTS

    def observe(self, successes: int, trials: int, *, updates_rest: bool = False) -> GuardVerdict:
        """Adds one step's first drafts.  updates_rest: whether updates rest."""
        self.current.add(successes, trials)
        self._newest.add(successes, trials)
        if self.hold_drafts:
            return self._measure_baseline(self.current)
        if self._has_collapsed():
            return self._reject()
        if not self._is_due or self._waits_for_newest:
            return GuardVerdict.NONE
        return self._judge(self.current, updates_rest=updates_rest)

    def _judge(self, current: Acceptance, *, updates_rest: bool) -> GuardVerdict:
        """Judges when enough drafts were observed."""
        fall = current.drop_in_standard_errors(self.good) if self._is_unjudged else 0.0
        at_rest = updates_rest and self._is_unjudged
        max_drafts = _MAX_DRAFTS_AT_REST if at_rest else _MAX_DRAFTS
        is_last = current.trials >= max_drafts
        bound = 0.0 if is_last else _NOISE_STANDARD_ERRORS
        if fall > (bound if at_rest else _FALL_STANDARD_ERRORS):
            return self._reject()
        if fall > (-_NOISE_STANDARD_ERRORS if at_rest else _NOISE_STANDARD_ERRORS) and not is_last:
            self._due_drafts += _JUDGE_EVERY_DRAFTS
            return GuardVerdict.NONE
        if not self._is_unjudged or fall <= 0 or is_last:
            self.good = current
        self._restart_observation()
        if not self._is_unjudged:
            return GuardVerdict.NONE
        self._is_unjudged, self._fall_count = False, 0
        return GuardVerdict.GOOD

    @property
    def _is_due(self) -> bool:
        return self.current.trials >= self._due_drafts

    @property
    def _waits_for_newest(self) -> bool:
        """Whether the newest update has too few drafts to be judged."""
        return self._is_unjudged and self._newest.trials < _MIN_NEWEST_DRAFTS

    def _has_collapsed(self) -> bool:
        """Whether acceptance has collapsed, since the good weights or by the last update."""
        current, newest, good = self.current, self._newest, self.good
        if not self._is_unjudged or current.trials < _MIN_DRAFTS:
            return False
        if current.drop_in_standard_errors(good) > _EARLY_FALL_STANDARD_ERRORS:
            return True
        # Drafts between the good and the newest weights may have had a higher rate than both.
        earlier = current.subtract(newest)
        best = earlier if earlier.rate > good.rate else good
        return (
            newest.trials >= _MIN_NEWEST_DRAFTS
            # With few drafts and a rate near 1, chance alone can be many standard errors.
            and newest.rate < best.rate / 2
            and newest.drop_in_standard_errors(best) > _EARLY_FALL_STANDARD_ERRORS
        )

    def _measure_baseline(self, current: Acceptance) -> GuardVerdict:
        if current.trials < self.hold_drafts:
            return GuardVerdict.NONE
        # Weights that were learnt before the baseline become the baseline.
        learnt, self._is_unjudged = self._is_unjudged, False
        self.good, self.hold_drafts = current, 0
        self._restart_observation()
        return GuardVerdict.GOOD if learnt else GuardVerdict.NONE

    def _restart_observation(self) -> None:
        self.current, self._newest, self._due_drafts = (
            Acceptance(),
            Acceptance(),
            _JUDGE_EVERY_DRAFTS,
        )

    def _reject(self) -> GuardVerdict:
        """Rejects the weights; `good` and `current` stay until `on_other_weights`, for the log."""
        self.hold_drafts = _JUDGE_EVERY_DRAFTS * 2 ** min(self._fall_count, _MAX_HOLD_DOUBLINGS)
        self._fall_count += 1
        return GuardVerdict.WORSE
