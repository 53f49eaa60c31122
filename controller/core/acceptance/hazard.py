"""Estimates how often the traffic shifts, and how often to more accepted drafts."""

from typing import NamedTuple

from controller.core.recorded_state import recorded

# Shifts are expected once in so many steps before any was seen; how long their rate is remembered.
_PRIOR_STEPS = 2000.0
_MEMORY_STEPS = 20_000.0
# Shifts in one direction that follow one another sooner are one change that takes a while: a batch
# that drains, say, whose last requests are those that accept least.
_ONE_CHANGE_STEPS = 100
# A shift so many steps after a move of the batch size came with it; how often one did is remembered
# for so many moves, and was this before the first one.
_MOVED_STEPS = 12
_MEMORY_MOVES = 100.0
_PRIOR_MOVED = 0.02
# A shift that is found so many steps after one at gamma = 0 came while that ran.
_FOUND_STEPS = 16


class Hazard(NamedTuple):
    """Holds the probability of a shift in one step.

    expected: of any, with the prior.  better: of one to more accepted drafts, as observed.  unseen:
    of one to more accepted drafts in a step at gamma = 0, as observed; found: how many there were.
    """

    expected: float
    better: float
    unseen: float = 0.0
    found: float = 0.0


@recorded(
    "hazard_estimator",
    "_steps _shifts _better _blind_steps _blind_better _moves _moved _since_move _since_shift "
    "_since_blind _direction",
)
class HazardEstimator:
    """Counts steps, changes of traffic, and those to more accepted drafts; old ones fade."""

    def __init__(self) -> None:
        self._steps = _PRIOR_STEPS
        self._shifts = self._better = 0.0
        # The same at gamma = 0, where shifts are only found by looking.
        self._blind_steps = self._blind_better = 0.0
        # Moves of the batch size to another octave, and those with a shift.
        self._moves = self._moved = 0.0
        self._since_move = _MOVED_STEPS
        # Steps since the last shift, and its direction; steps since the last one at gamma = 0.
        self._since_shift = self._direction = 0
        self._since_blind = _FOUND_STEPS

    def step(self, gamma: int) -> None:
        """Counts a step."""
        self._steps += 1
        self._since_blind += 1
        self._since_move += 1
        if gamma == 0:
            self._since_blind = 0
            self._blind_steps += 1
            if self._blind_steps > _MEMORY_STEPS:
                keep = _MEMORY_STEPS / self._blind_steps
                self._blind_steps *= keep
                self._blind_better *= keep
        self._since_shift += 1
        if self._steps > _MEMORY_STEPS:
            keep = _MEMORY_STEPS / self._steps
            self._steps *= keep
            self._shifts *= keep
            self._better *= keep

    def move(self) -> None:
        """Counts that the batch size has moved to another octave before this step."""
        keep = 1 - 1 / _MEMORY_MOVES
        self._moves, self._moved = keep * self._moves + 1, keep * self._moved
        self._since_move = 0

    def shift(self, direction: int) -> None:
        """Counts a shift in this step.  direction: 1 to more accepted drafts, -1 to fewer."""
        continues = direction == self._direction and self._since_shift <= _ONE_CHANGE_STEPS
        if self._since_move < _MOVED_STEPS:
            self._moved += 1
            self._since_move = _MOVED_STEPS
        if not continues:
            self._shifts += 1
            self._better += direction > 0
            self._blind_better += direction > 0 and self._since_blind < _FOUND_STEPS
        self._since_shift, self._direction = 0, direction

    @property
    def expected(self) -> float:
        """Returns the probability of any shift in one step, with the prior."""
        return (1 + self._shifts) / self._steps

    @property
    def on_move(self) -> float:
        """Returns the probability of any shift when the batch size moves to another octave."""
        return (self._moved + _PRIOR_MOVED) / (self._moves + 1)

    @property
    def hazard(self) -> Hazard:
        """Returns the probabilities that a plan is made with."""
        return Hazard(
            self.expected,
            self._better / self._steps,
            self._blind_better / max(self._blind_steps, 1.0),
            self._blind_better,
        )
