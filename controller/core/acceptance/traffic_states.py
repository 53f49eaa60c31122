"""Keeps the current traffic state and the remembered ones, and decides which one is current.

A report first updates the odds of the remembered states (`traffic_state`).  If one of them becomes
more likely than the current state, it becomes current again, with its stored curves of all
drafters.  If the current state's tests detect a shift that no remembered state explains, a new
state begins; a current state with few steps is restarted instead.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.shifts import LARGE, MODERATE, HazardEstimator
from controller.core.acceptance.traffic_state import (
    FORGOTTEN_STEPS,
    MAX_REMEMBERED,
    OCTAVES,
    Believed,
    RememberedCurves,
    TrafficState,
    are_alike,
    believed,
    octave_of,
)
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# A state with fewer steps is not remembered: after a shift it is restarted.
_YOUNG_STEPS = 15
# Probability above which a remembered state explains a shift.
_EXPLAINS = 0.3
# Probability of a new state when it begins.
_NEW = 0.8
# A state that is left within this many reports was a mistake.  After this many mistakes in a row
# the traffic counts as new: it resembles one state by one drafter and another by another drafter.
_MISTAKEN_REPORTS = 8
_MISTAKES = 2
# Reports at one octave in one state after which the state is certain and a visit is counted.
_VISIT_REPORTS = 12
# A state is certain if all others together are less likely than this.
_NEGLIGIBLE = 0.01

Curves = Mapping[str, AcceptanceCurve]


@recorded(
    "traffic_states",
    "current remembered shifts hazards _believed octave _stay _reports _mistakes",
    derived="_curves",
)
class TrafficStates:
    """Owns the estimators of all traffic.  `fold` and `believe` change it; `curves` reads it.

    gammas: the longest draft length of each drafter.
    """

    def __init__(self, gammas: Mapping[str, int], settings: PlannerSettings) -> None:
        changes = (LARGE, MODERATE) if len(gammas) > 1 else (LARGE,)
        self.current = TrafficState(
            {name: AcceptanceEstimator(most, settings, changes) for name, most in gammas.items()}
        )
        self.remembered: list[TrafficState] = []
        self.shifts = 0
        self.hazards = HazardEstimator()
        # By drafter, the baseline of the likelihood ratios, as of the last decision.
        self._believed: dict[str, Believed] = {}
        # Values derived from the remembered states.
        self._curves: RememberedCurves | None = None
        # Octave of the last batch; -1 before the first one.
        self.octave = -1
        # Reports since the octave or the state changed.
        self._stay = 0
        self._reports = self._mistakes = 0

    def make_room(self, remembered: int) -> None:
        """Allocates this many remembered states, for a recorded state to be restored into."""
        drafters = self.current.drafters
        self._recall(
            [
                TrafficState({name: e.successor(doubted=False) for name, e in drafters.items()})
                for _ in range(remembered)
            ]
        )

    @property
    def all(self) -> tuple[TrafficState, ...]:
        """Returns the current state, then the remembered ones."""
        return (self.current, *self.remembered)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        for state in self.all:
            for estimator in state.drafters.values():
                estimator.use_settings(settings)
        self._curves = None

    def fold(self, report: StepReport, now: float) -> bool:
        """Adds a report.  now: clock seconds.  Returns True if another state becomes current."""
        self._reports += 1
        self._stay += 1
        self.hazards.step(report.gamma)
        octave = octave_of(report.batch_size)
        if octave != self.octave:
            self._move_to(octave)
        likeliest = self._weigh(report)
        if likeliest is not self.current and report.gamma > 0:
            self._mistakes = self._mistakes + 1 if self._stay <= _MISTAKEN_REPORTS else 0
            if self._mistakes < _MISTAKES:
                self._return_to(likeliest, report, now)
            else:
                self._mistakes = 0
                self.shifts += 1
                self._begin("", now)
            self._take(report, now)
            return True
        direction = self._take(report, now)
        if not direction:
            if self._stay == _VISIT_REPORTS:
                self.current.enter(octave)
            return False
        self.shifts += 1
        second = max(self.remembered, key=_probability, default=None)
        if second is not None and second.probability > _EXPLAINS:
            self._return_to(second, report, now)
            self._take(report, now)
            return True
        self.hazards.shift(direction)
        if self.current.steps < _YOUNG_STEPS:
            self._start_again(report.drafter)
        else:
            self._begin(report.drafter, now)
        return True

    def _take(self, report: StepReport, now: float) -> int:
        """Adds a report to the current state's estimators; returns the direction of a shift."""
        state = self.current
        state.steps += 1
        state.last_step, state.ended = self._reports, now
        shown = report.shown
        direction = 0
        for name, estimator in state.drafters.items():
            if name == report.drafter and report.gamma:
                direction = estimator.fold(*report.drafted)
            elif name in shown:
                estimator.fold_aside(*shown[name])
            else:
                estimator.pass_by()
        return direction

    def _predicted(self, hazard: float) -> list[float]:
        """Returns the probability of each state, as in `all`.  hazard: of a change of state."""
        states = self.all
        each = hazard / sum([state.visits for state in states])
        return [(1 - hazard) * state.probability + each * state.visits for state in states]

    def _move_to(self, octave: int) -> None:
        if self.octave >= 0:
            likely = self._predicted(self.hazards.on_move)
            shares = [state.octave_shares()[octave] for state in self.all]
            self._set([p * share for p, share in zip(likely, shares, strict=True)])
            self.hazards.move()
        self.octave, self._stay = octave, 1

    def _weigh(self, report: StepReport) -> TrafficState:
        """Updates the probabilities with a report, and returns the most likely state."""
        if not self.remembered:
            return self.current
        likely = self._predicted(self.hazards.expected)
        against = self._believed.get(report.drafter)
        if against is not None and report.gamma > 0:
            odds = self.remembered_curves().log_odds(report.drafter, against, *report.drafted)
            for k, log_odds in enumerate(odds, start=1):
                likely[k] *= math.exp(log_odds)
        self._set(likely)
        most = likely.index(max(likely))
        return self.remembered[most - 1] if most else self.current

    def _set(self, likely: Sequence[float]) -> None:
        """Sets the states' probabilities, in the order of `all`; normalises them."""
        total = sum(likely)
        for state, value in zip(self.all, likely, strict=True):
            state.probability = value / total

    def _return_to(self, state: TrafficState, report: StepReport, now: float) -> None:
        before, gamma = self.current, report.gamma
        curves = [s.drafters[report.drafter].curve().expected for s in (before, state)]
        self.hazards.shift(1 if curves[1][gamma] > curves[0][gamma] else -1)
        self.shifts += 1
        self._recall([other for other in self.remembered if other is not state])
        if before.steps >= _YOUNG_STEPS:
            self._remember(before)
        state.return_at(now)
        self.current, self._stay = state, 1
        self._set([s.probability for s in self.all])

    def _begin(self, running: str, now: float) -> None:
        """Starts a new state after a shift.

        running: the drafter whose latest reports are from the new traffic, or "".
        """
        old = self.current
        self.current = TrafficState(
            {
                name: estimator.successor(doubted=name != running)
                for name, estimator in old.drafters.items()
            },
            now,
        )
        self._remember(old)
        self._set([_NEW, *([(1 - _NEW) / len(self.remembered)] * len(self.remembered))])
        self._stay = 1

    def _start_again(self, running: str) -> None:
        for name, estimator in self.current.drafters.items():
            if name == running:
                estimator.forget()
            else:
                # Evidence about a drafter from other traffic has little value for this traffic.
                estimator.doubt()

    def _remember(self, state: TrafficState) -> None:
        """Remembers a state that is no longer current, merged with remembered states like it."""
        kept = []
        for other in self.remembered:
            if self._reports - other.last_step > FORGOTTEN_STEPS:
                continue
            if are_alike(state, other):
                state.absorb(other)
            else:
                kept.append(other)
        kept.sort(key=lambda other: other.last_step)
        self._recall([*kept[-(MAX_REMEMBERED - 1) :], state])

    def _recall(self, states: list[TrafficState]) -> None:
        """Replaces the remembered states; reports update their odds after the next decision."""
        self.remembered, self._curves, self._believed = states, None, {}

    def believe(self) -> Curves:
        """Returns the current state's curves, and makes them the reference for later reports."""
        found = {name: e.believe() for name, e in self.current.drafters.items()}
        if self.remembered:
            self._believed = {name: believed(curve) for name, curve in found.items()}
        return found

    def curves(self) -> Curves:
        """Returns the current state's curves."""
        return {name: e.curve() for name, e in self.current.drafters.items()}

    def remembered_curves(self) -> RememberedCurves:
        """Returns the values derived from the remembered states."""
        if self._curves is None:
            self._curves = RememberedCurves(self.remembered)
        return self._curves

    def weights(self) -> NDArray[np.float64] | None:
        """Returns [octaves, states], P(state | octave of the next batch); rows sum to 1.

        States are ordered as in `all`.  None if the current state is nearly certain in all octaves.
        """
        if not self.remembered:
            return None
        likely = np.empty((OCTAVES, 1 + len(self.remembered)))
        likely[:, 0] = self.current.octave_shares()
        likely[:, 1:] = self.remembered_curves().octaves
        likely *= self._predicted(self.hazards.on_move)
        if self.octave >= 0:
            likely[self.octave] = self._predicted(self.hazards.expected)
        likely /= likely.sum(axis=1, keepdims=True)
        return likely if bool((likely[:, 0] < 1 - _NEGLIGIBLE).any()) else None


def _probability(state: TrafficState) -> float:
    return state.probability
