"""Detects shifts of the traffic from accepted counts, and estimates how often they occur."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.core.acceptance.outcome_scores import OutcomeScores
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# Acceptance is clipped to this range.
_MIN_ACCEPTANCE, _MAX_ACCEPTANCE = 0.02, 0.98


@dataclass(frozen=True, slots=True)
class ShiftKind:
    """Describes a kind of shift.

    logit_shift: how far acceptance moves on the logit scale.  limit_factor: factor on
    `shift_alarm`. half_trust_exposures: exposures at which an estimate has half its weight.
    """

    logit_shift: float
    limit_factor: float
    half_trust_exposures: float


LARGE_SHIFT = ShiftKind(1.5, 1.0, 8.0)
MODERATE_SHIFT = ShiftKind(0.6, 1.7, 60.0)


@recorded(
    "cusum",
    "_conditional _exposures",
    derived="_scores",
    better="_upward_sum",
    worse="_downward_sum",
)
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

    def __init__(self, settings: PlannerSettings, shift_kind: ShiftKind = LARGE_SHIFT) -> None:
        self._shift_kind = shift_kind
        self.use_settings(settings)
        # The reference that steps are tested against; empty before the first decision.
        self._conditional: Sequence[float] = []
        self._exposures: Sequence[float] = []
        # What each outcome of a sequence adds to the upward and to the downward sum.
        self._scores: OutcomeScores | None = None
        self._upward_sum = 0.0
        self._downward_sum = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the sums."""
        self._limit = self._shift_kind.limit_factor * settings.shift_alarm
        self._prior_exposures = settings.shift_prior_exposures

    def set_reference(self, conditional: Sequence[float], exposures: Sequence[float]) -> None:
        """Sets the estimates that the next steps are tested against.

        Evidence already absorbed by the estimates is removed from the sums.
        """
        previous_exposures = self._exposures[0] if self._exposures else 0.0
        current_exposures = exposures[0] if exposures else 0.0
        prior = self._prior_exposures
        kept_share = min(1.0, (previous_exposures + prior) / (current_exposures + prior))
        self._upward_sum *= kept_share
        self._downward_sum *= kept_share
        self._conditional, self._exposures, self._scores = conditional, exposures, None

    def _compute_scores(self) -> OutcomeScores:
        """Returns the scores of the upward and the downward sum."""
        logit_shift, half_trust = (
            self._shift_kind.logit_shift,
            self._shift_kind.half_trust_exposures,
        )
        rise, fall = math.exp(logit_shift) - 1, math.exp(-logit_shift) - 1
        up = down = 0.0
        rejected_up, rejected_down, accepted_up, accepted_down = [], [], [up], [down]
        for a, n in zip(self._conditional, self._exposures, strict=True):
            p = min(max(a, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)
            evidence = n + self._prior_exposures
            trust = evidence / (evidence + half_trust)
            # With b = p e^L / (1 - p + p e^L): log((1 - b) / (1 - p)) = -log(1 - p + p e^L).
            # At either bound no shift is possible: acceptance 1 is no shift from 0.98.
            failure = -trust * math.log(1 + p * rise) if a < _MAX_ACCEPTANCE else 0.0
            rejected_up.append(up + failure)
            up += failure + trust * logit_shift if a < _MAX_ACCEPTANCE else 0.0
            accepted_up.append(up)
            failure = -trust * math.log(1 + p * fall) if a > _MIN_ACCEPTANCE else 0.0
            rejected_down.append(down + failure)
            down += failure - trust * logit_shift if a > _MIN_ACCEPTANCE else 0.0
            accepted_down.append(down)
        return OutcomeScores([rejected_up, rejected_down], [accepted_up, accepted_down])

    def observe(self, accepted_counts: Sequence[int], censored_counts: Sequence[int] = ()) -> int:
        """Adds a step's counts; returns the direction of a shift, 1 (better) or -1, otherwise 0.

        A shift is detected if a sum exceeds the limit; both sums then restart.  censored_counts: as
        in `AcceptanceEstimator.observe`.
        """
        scores = self._scores
        if scores is None:
            # Computed on demand: most drafters do not run before the next decision.
            scores = self._scores = self._compute_scores()
        up, down = scores.totals(accepted_counts, censored_counts)
        up = self._upward_sum = max(0.0, self._upward_sum + up)
        down = self._downward_sum = max(0.0, self._downward_sum + down)
        if up <= self._limit and down <= self._limit:
            return 0
        direction = 1 if up > down else -1
        self._upward_sum = self._downward_sum = 0.0
        return direction


class ShiftProbabilities(NamedTuple):
    """Holds the probability of a shift in one step.

    any_shift: of any shift, with the prior.  better_shift: of a shift to more accepted drafts, as
    observed.  unobserved_better_shift: of such a shift in a step at gamma = 0, as observed;
    unobserved_better_count: their number.
    """

    any_shift: float
    better_shift: float
    unobserved_better_shift: float = 0.0
    unobserved_better_count: float = 0.0


@recorded(
    "hazard_estimator",
    "_steps _shifts _moves",
    blind_steps="_unobserved_steps",
    better="_better_shifts",
    blind_better="_unobserved_better_shifts",
    moved="_shifts_on_move",
    since_move="_steps_since_move",
    since_shift="_steps_since_shift",
    since_blind="_steps_since_unobserved",
    direction="_last_direction",
)
class HazardEstimator:
    """Counts steps, shifts, and shifts to more accepted drafts; old counts fade."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._steps = settings.hazard_prior_steps
        self._shifts = self._better_shifts = 0.0
        # The same at gamma = 0, where only probes can detect shifts.
        self._unobserved_steps = self._unobserved_better_shifts = 0.0
        # Moves of the batch size to another octave, and those with a shift.
        self._moves = self._shifts_on_move = 0.0
        self._steps_since_move = settings.move_window_steps
        # Steps since the last shift, and its direction; steps since the last one at gamma = 0.
        self._steps_since_shift = self._last_direction = 0
        self._steps_since_unobserved = settings.unobserved_detection_steps

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the counts."""
        self._settings = settings

    def observe_step(self, gamma: int) -> None:
        """Counts a step."""
        memory_steps = self._settings.hazard_memory_steps
        self._steps += 1
        self._steps_since_unobserved += 1
        self._steps_since_move += 1
        if gamma == 0:
            self._steps_since_unobserved = 0
            self._unobserved_steps += 1
            if self._unobserved_steps > memory_steps:
                kept_share = memory_steps / self._unobserved_steps
                self._unobserved_steps *= kept_share
                self._unobserved_better_shifts *= kept_share
        self._steps_since_shift += 1
        if self._steps > memory_steps:
            kept_share = memory_steps / self._steps
            self._steps *= kept_share
            self._shifts *= kept_share
            self._better_shifts *= kept_share

    def observe_batch_move(self) -> None:
        """Counts that the batch size has moved to another octave before this step."""
        kept_share = 1 - 1 / self._settings.move_memory
        self._moves, self._shifts_on_move = (
            kept_share * self._moves + 1,
            kept_share * self._shifts_on_move,
        )
        self._steps_since_move = 0

    def observe_shift(self, direction: int) -> None:
        """Counts a shift in this step.  direction: 1 to more accepted drafts, -1 to fewer."""
        is_continuation = (
            direction == self._last_direction
            and self._steps_since_shift <= self._settings.gradual_shift_steps
        )
        if self._steps_since_move < self._settings.move_window_steps:
            self._shifts_on_move += 1
            self._steps_since_move = self._settings.move_window_steps
        if not is_continuation:
            self._shifts += 1
            self._better_shifts += direction > 0
            self._unobserved_better_shifts += (
                direction > 0
                and self._steps_since_unobserved < self._settings.unobserved_detection_steps
            )
        self._steps_since_shift, self._last_direction = 0, direction

    @property
    def shift_probability(self) -> float:
        """Returns the probability of any shift in one step, with the prior."""
        return (1 + self._shifts) / self._steps

    @property
    def shift_probability_on_move(self) -> float:
        """Returns the probability of any shift when the batch size moves to another octave."""
        return (self._shifts_on_move + self._settings.move_prior) / (self._moves + 1)

    @property
    def probabilities(self) -> ShiftProbabilities:
        """Returns the shift probabilities for a plan."""
        return ShiftProbabilities(
            self.shift_probability,
            self._better_shifts / self._steps,
            self._unobserved_better_shifts / max(self._unobserved_steps, 1.0),
            self._unobserved_better_shifts,
        )
