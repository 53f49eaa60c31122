"""Detects shifts of the traffic from accepted counts, and estimates how often they occur."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# Acceptance is clipped to this range.
_LEAST, _MOST = 0.02, 0.98
# Exposures of a position that was never reached.
_PRIOR_TRUST = 3.0
# Steps between shifts that are assumed before the first one, and the memory of their rate.
_PRIOR_STEPS = 2000.0
_MEMORY_STEPS = 20_000.0
# Shifts in the same direction within this many steps count as one gradual change, for example of a
# batch that drains and whose last requests accept least.
_ONE_CHANGE_STEPS = 100
# A shift within this many steps of a batch-size change is attributed to the change.  The share of
# changes with a shift has this memory, in changes, and this value before the first one.
_MOVED_STEPS = 12
_MEMORY_MOVES = 100.0
_PRIOR_MOVED = 0.02
# A shift detected within this many steps of one at gamma = 0 occurred while gamma = 0 ran.
_FOUND_STEPS = 16


@dataclass(frozen=True, slots=True)
class Change:
    """Describes a kind of shift.

    logits: how far acceptance moves on the logit scale.  limit: factor on `shift_alarm`.
    half_trust: exposures at which an estimate has half its weight.
    """

    logits: float
    limit: float
    half_trust: float


LARGE = Change(1.5, 1.0, 8.0)
MODERATE = Change(0.6, 1.7, 60.0)


@recorded("cusum", "_conditional _exposures _better _worse", derived="_steps")
class Cusum:
    """Keeps the two sums of one estimator, for one kind of shift.

    They are Page's cumulative sums (Biometrika 1954) over all positions together, one for higher
    and one for lower acceptance:

        W <- max(0, W + sum over k of
                        successes_k log(b_k / a_k) + failures_k log((1 - b_k) / (1 - a_k)))

    where a_k is the estimate of the last decision and b_k is a_k moved on the logit scale.  W above
    `shift_alarm` is a shift.  A window test of one position needs several sequences; this test
    detects a large shift from one or two drafts that are accepted deep where one in ten was.
    Moderate shifts matter if a drafter is idle: a shift that hardly affects the running drafter may
    have made the idle one the best.  They need more evidence.
    """

    def __init__(self, settings: PlannerSettings, change: Change = LARGE) -> None:
        self._change = change
        self.use_settings(settings)
        # The reference that steps are tested against; empty before the first decision.
        self._conditional: Sequence[float] = []
        self._exposures: Sequence[float] = []
        # By position, the increments of both sums for a success and for a failure.
        self._steps: list[tuple[float, float, float, float]] | None = None
        self._better = 0.0
        self._worse = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the sums."""
        self._limit = self._change.limit * settings.shift_alarm

    def believe(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Sets the estimates that the next steps are tested against.

        Evidence already absorbed by the estimates is removed from the sums.
        """
        before = self._exposures[0] if self._exposures else 0.0
        behind = exposures[0] if exposures else 0.0
        left = min(1.0, (before + _PRIOR_TRUST) / (behind + _PRIOR_TRUST))
        self._better *= left
        self._worse *= left
        self._conditional, self._exposures, self._steps = conditional, exposures, None

    def _worked_out(self) -> list[tuple[float, float, float, float]]:
        """Returns increments by position, for success and failure: of `_better`, then `_worse`."""
        found = []
        logits, half_trust = self._change.logits, self._change.half_trust
        factor = math.exp(logits)
        rise, fall = factor - 1, 1 / factor - 1
        for a, n in zip(self._conditional, self._exposures, strict=True):
            p = min(max(a, _LEAST), _MOST)
            trust = (n + _PRIOR_TRUST) / (n + _PRIOR_TRUST + half_trust)
            # With b = p e^L / (1 - p + p e^L): log((1 - b) / (1 - p)) = -log(1 - p + p e^L).
            better = -trust * math.log(1 + p * rise)
            worse = -trust * math.log(1 + p * fall)
            # At either bound no shift is possible: acceptance 1 is no shift from 0.98.
            up = (better + trust * logits, better) if a < _MOST else (0.0, 0.0)
            down = (worse - trust * logits, worse) if a > _LEAST else (0.0, 0.0)
            found.append((*up, *down))
        return found

    def fold(self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()) -> int:
        """Adds a step's counts; returns the direction of a shift, 1 (better) or -1, otherwise 0.

        A shift is detected if a sum exceeds the limit; both sums then restart.  censored_counts: as
        in `AcceptanceEstimator.fold`.
        """
        steps = self._steps
        if steps is None:
            # Computed on demand: most drafters do not run before the next decision.
            steps = self._steps = self._worked_out()
        reached = sum(accepted_counts) + sum(censored_counts)
        up = down = 0.0
        for k, (failures, (good, bad, good_down, bad_down)) in enumerate(
            zip(accepted_counts[:-1], steps, strict=False)
        ):
            if censored_counts:
                reached -= censored_counts[k]
            if reached == 0:
                break
            reached -= failures
            up += reached * good + failures * bad
            down += reached * good_down + failures * bad_down
        self._better = max(0.0, self._better + up)
        self._worse = max(0.0, self._worse + down)
        if self._better <= self._limit and self._worse <= self._limit:
            return 0
        direction = 1 if self._better > self._worse else -1
        self._better = self._worse = 0.0
        return direction


class Hazard(NamedTuple):
    """Holds the probability of a shift in one step.

    expected: of any shift, with the prior.  better: of a shift to more accepted drafts, as
    observed.  unseen: of such a shift in a step at gamma = 0, as observed; found: their number.
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
    """Counts steps, shifts, and shifts to more accepted drafts; old counts fade."""

    def __init__(self) -> None:
        self._steps = _PRIOR_STEPS
        self._shifts = self._better = 0.0
        # The same at gamma = 0, where only probes can detect shifts.
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
        """Returns the shift probabilities for a plan."""
        return Hazard(
            self.expected,
            self._better / self._steps,
            self._blind_better / max(self._blind_steps, 1.0),
            self._blind_better,
        )
