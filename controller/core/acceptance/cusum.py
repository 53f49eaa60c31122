"""Tests sequentially for changes of acceptance, over all positions together.

Page's cumulative sum (Biometrika 1954), one for better and one for worse:

    W <- max(0, W + sum over k of
                    successes_k log(b_k / a_k) + failures_k log((1 - b_k) / (1 - a_k)))

with a_k as believed and b_k the same moved on the logit scale; W above `shift_alarm` is a shift.  A
window of one position needs a handful of sequences; a test for large changes needs a draft or two
that go deep where one in ten was accepted.  Moderate changes matter where a drafter is idle: what
the running one hardly shows may have made the other one the best.  They need more evidence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# Acceptance below and above counts as this much.
_LEAST, _MOST = 0.02, 0.98
# The exposures that a position counts as having before it was ever reached.
_PRIOR_TRUST = 3.0


@dataclass(frozen=True, slots=True)
class Change:
    """Describes a kind of change.

    logits: how far acceptance moves on the logit scale.  limit: factor on `shift_alarm`.
    half_trust: exposures with which an estimate counts by half.
    """

    logits: float
    limit: float
    half_trust: float


LARGE = Change(1.5, 1.0, 8.0)
MODERATE = Change(0.6, 1.7, 60.0)


@recorded("cusum", "_conditional _exposures _better _worse", derived="_steps")
class Cusum:
    """Keeps both sums of one estimator, for one kind of change."""

    def __init__(self, settings: PlannerSettings, change: Change = LARGE) -> None:
        self._change = change
        self.use_settings(settings)
        # What steps are tested against; nothing before the first decision.
        self._conditional: Sequence[float] = []
        self._exposures: Sequence[float] = []
        # By position, what a success and a failure add to each sum.
        self._steps: list[tuple[float, float, float, float]] | None = None
        self._better = 0.0
        self._worse = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the sums."""
        self._limit = self._change.limit * settings.shift_alarm

    def believe(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Takes the estimates that the next steps are tested against.

        What they have learnt since the last ones is no evidence against them any more.
        """
        before = self._exposures[0] if self._exposures else 0.0
        behind = exposures[0] if exposures else 0.0
        left = min(1.0, (before + _PRIOR_TRUST) / (behind + _PRIOR_TRUST))
        self._better *= left
        self._worse *= left
        self._conditional, self._exposures, self._steps = conditional, exposures, None

    def _worked_out(self) -> list[tuple[float, float, float, float]]:
        """Returns by position what a success and a failure add: to `better`, then to `worse`."""
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
            # At either end nothing is left to change to: always 1 is no shift from 0.98.
            up = (better + trust * logits, better) if a < _MOST else (0.0, 0.0)
            down = (worse - trust * logits, worse) if a > _LEAST else (0.0, 0.0)
            found.append((*up, *down))
        return found

    def fold(self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()) -> int:
        """Takes a step's counts; returns the direction of a shift, 1 (better) or -1, else 0.

        It is one when a sum has passed the limit; both restart then.  censored_counts: as
        `AcceptanceEstimator.fold` takes them.
        """
        steps = self._steps
        if steps is None:
            # Most drafters that are believed do not run before the next decision.
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
