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
from controller.core.acceptance.shifts import LARGE_SHIFT, MODERATE_SHIFT, HazardEstimator
from controller.core.acceptance.traffic_state import (
    OCTAVES,
    ReferenceAcceptance,
    RememberedCurves,
    TrafficState,
    are_alike,
    octave_of,
    reference_acceptance,
)
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

CurvesByDrafter = Mapping[str, AcceptanceCurve]


@recorded(
    "traffic_states",
    "current remembered shifts octave _reports",
    derived="_remembered_curves",
    hazards="hazard_estimator",
    believed="_reference",
    stay="_reports_in_place",
    mistakes="_mistakes_in_a_row",
)
class TrafficStateTracker:
    """Owns the estimators of all traffic.  `observe` and `commit` change it; `curves` reads it.

    longest_gammas: the longest draft length of each drafter.
    """

    def __init__(self, longest_gammas: Mapping[str, int], settings: PlannerSettings) -> None:
        self._settings = settings
        shift_kinds = (LARGE_SHIFT, MODERATE_SHIFT) if len(longest_gammas) > 1 else (LARGE_SHIFT,)
        self.current = TrafficState(
            {
                name: AcceptanceEstimator(gamma_max, settings, shift_kinds)
                for name, gamma_max in longest_gammas.items()
            },
            settings,
        )
        self.remembered: list[TrafficState] = []
        self.shifts = 0
        self.hazard_estimator = HazardEstimator(settings)
        # By drafter, the baseline of the likelihood ratios, as of the last decision.
        self._reference: dict[str, ReferenceAcceptance] = {}
        # Values derived from the remembered states.
        self._remembered_curves: RememberedCurves | None = None
        # Octave of the last batch; -1 before the first one.
        self.octave = -1
        # Reports since the octave or the state changed.
        self._reports_in_place = 0
        self._reports = self._mistakes_in_a_row = 0

    def allocate_remembered(self, count: int) -> None:
        """Allocates this many remembered states, for a recorded state to be restored into."""
        estimators = self.current.estimators
        self._set_remembered(
            [
                TrafficState(
                    {name: e.make_successor(was_idle=False) for name, e in estimators.items()},
                    self._settings,
                )
                for _ in range(count)
            ]
        )

    @property
    def all_states(self) -> tuple[TrafficState, ...]:
        """Returns the current state, then the remembered ones."""
        return (self.current, *self.remembered)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        for state in self.all_states:
            state.use_settings(settings)
        self.hazard_estimator.use_settings(settings)
        self._remembered_curves = None

    def observe(self, report: StepReport, now: float) -> bool:
        """Adds a report.  now: clock seconds.  Returns True if another state becomes current."""
        self._reports += 1
        self._reports_in_place += 1
        self.hazard_estimator.observe_step(report.gamma)
        octave = octave_of(report.batch_size)
        if octave != self.octave:
            self._move_to_octave(octave)
        likeliest_state = self._update_probabilities(report) if self.remembered else self.current
        if likeliest_state is not self.current and report.gamma > 0:
            self._mistakes_in_a_row = (
                self._mistakes_in_a_row + 1
                if self._reports_in_place <= self._settings.mistaken_reports
                else 0
            )
            if self._mistakes_in_a_row < self._settings.mistakes_max:
                self._return_to_state(likeliest_state, report, now)
            else:
                self._mistakes_in_a_row = 0
                self.shifts += 1
                self._begin_state("", now)
            self._feed_current_state(report, now)
            return True
        direction = self._feed_current_state(report, now)
        if not direction:
            if self._reports_in_place == self._settings.octave_visit_reports:
                self.current.count_octave_visit(octave)
            return False
        self.shifts += 1
        likeliest_remembered = max(self.remembered, key=_probability, default=None)
        if (
            likeliest_remembered is not None
            and likeliest_remembered.probability > self._settings.state_explains_probability
        ):
            self._return_to_state(likeliest_remembered, report, now)
            self._feed_current_state(report, now)
            return True
        self.hazard_estimator.observe_shift(direction)
        if self.current.steps < self._settings.young_state_steps:
            self._restart_state(report.drafter)
        else:
            self._begin_state(report.drafter, now)
        return True

    def _feed_current_state(self, report: StepReport, now: float) -> int:
        """Adds a report to the current state's estimators; returns the direction of a shift."""
        state = self.current
        state.steps += 1
        state.last_step, state.ended_at = self._reports, now
        running_drafter = report.drafter if report.gamma else ""
        proposal_counts = report.proposal_counts_by_drafter if report.proposals else {}
        direction = 0
        for name, estimator in state.estimators.items():
            if name == running_drafter:
                direction = estimator.observe(*report.drafted_counts)
            elif name in proposal_counts:
                estimator.observe_unused_proposals(*proposal_counts[name])
            else:
                estimator.observe_idle_step()
        return direction

    def _predict_probabilities(self, hazard: float) -> list[float]:
        """Returns the probability of each state of `all_states`.  hazard: of a change of state."""
        states = self.all_states
        hazard_per_visit, stay = hazard / sum([state.visits for state in states]), 1 - hazard
        return [stay * state.probability + hazard_per_visit * state.visits for state in states]

    def _move_to_octave(self, octave: int) -> None:
        if self.octave >= 0:
            probabilities = self._predict_probabilities(
                self.hazard_estimator.shift_probability_on_move
            )
            shares = [state.octave_probabilities()[octave] for state in self.all_states]
            self._set_probabilities(
                [p * share for p, share in zip(probabilities, shares, strict=True)]
            )
            self.hazard_estimator.observe_batch_move()
        self.octave, self._reports_in_place = octave, 1

    def _update_probabilities(self, report: StepReport) -> TrafficState:
        """Updates the probabilities with a report, and returns the most likely state."""
        probabilities = self._predict_probabilities(self.hazard_estimator.shift_probability)
        reference = self._reference.get(report.drafter)
        if reference is not None and report.gamma > 0:
            odds = self.remembered_curves().log_odds(
                report.drafter, reference, *report.drafted_counts
            )
            for k, log_odds in enumerate(odds, start=1):
                probabilities[k] *= math.exp(log_odds)
        self._set_probabilities(probabilities)
        best_index = probabilities.index(max(probabilities))
        return self.remembered[best_index - 1] if best_index else self.current

    def _set_probabilities(self, weights: Sequence[float]) -> None:
        """Sets the states' probabilities, in the order of `all_states`; normalises them."""
        total = sum(weights)
        for state, value in zip(self.all_states, weights, strict=True):
            state.probability = value / total

    def _return_to_state(self, state: TrafficState, report: StepReport, now: float) -> None:
        previous_state, gamma = self.current, report.gamma
        expected_accepted = [
            s.estimators[report.drafter].curve().expected_accepted for s in (previous_state, state)
        ]
        self.hazard_estimator.observe_shift(
            1 if expected_accepted[1][gamma] > expected_accepted[0][gamma] else -1
        )
        self.shifts += 1
        self._set_remembered(
            [
                remembered_state
                for remembered_state in self.remembered
                if remembered_state is not state
            ]
        )
        if previous_state.steps >= self._settings.young_state_steps:
            self._remember(previous_state)
        state.make_current_again(now)
        self.current, self._reports_in_place = state, 1
        self._set_probabilities([s.probability for s in self.all_states])

    def _begin_state(self, running_drafter: str, now: float) -> None:
        """Starts a new state after a shift.

        running_drafter: the drafter whose latest reports are from the new traffic, or "".
        """
        previous_state = self.current
        self.current = TrafficState(
            {
                name: estimator.make_successor(was_idle=name != running_drafter)
                for name, estimator in previous_state.estimators.items()
            },
            self._settings,
            now,
        )
        self._remember(previous_state)
        probability, others = self._settings.new_state_probability, len(self.remembered)
        self._set_probabilities([probability, *([(1 - probability) / others] * others)])
        self._reports_in_place = 1

    def _restart_state(self, running_drafter: str) -> None:
        for name, estimator in self.current.estimators.items():
            if name == running_drafter:
                estimator.reset_after_shift()
            else:
                # Evidence about a drafter from other traffic has little value for this traffic.
                estimator.discount_idle_evidence()

    def _remember(self, state: TrafficState) -> None:
        """Remembers a state that is no longer current, merged with remembered states like it."""
        distinct_states = []
        for remembered_state in self.remembered:
            if self._reports - remembered_state.last_step > self._settings.forget_state_steps:
                continue
            if are_alike(state, remembered_state, self._settings):
                state.merge_duplicate(remembered_state)
            else:
                distinct_states.append(remembered_state)
        distinct_states.sort(key=lambda remembered_state: remembered_state.last_step)
        dropped = max(0, len(distinct_states) + 1 - self._settings.remembered_states_max)
        self._set_remembered([*distinct_states[dropped:], state])

    def _set_remembered(self, states: list[TrafficState]) -> None:
        """Replaces the remembered states; reports update their odds after the next decision."""
        self.remembered, self._remembered_curves, self._reference = states, None, {}

    def commit(self) -> CurvesByDrafter:
        """Returns the current state's curves, and makes them the reference for later reports."""
        curves = {name: e.commit() for name, e in self.current.estimators.items()}
        if self.remembered:
            self._reference = {
                name: reference_acceptance(curve, self._settings) for name, curve in curves.items()
            }
        return curves

    def curves(self) -> CurvesByDrafter:
        """Returns the current state's curves."""
        return {name: e.curve() for name, e in self.current.estimators.items()}

    def remembered_curves(self) -> RememberedCurves:
        """Returns the values derived from the remembered states."""
        if self._remembered_curves is None:
            self._remembered_curves = RememberedCurves(self.remembered, self._settings)
        return self._remembered_curves

    def state_probabilities(self) -> NDArray[np.float64] | None:
        """Returns [octaves, states], P(state | octave of the next batch); rows sum to 1.

        States are ordered as in `all_states`.  None if the current state is nearly certain in all
        octaves.
        """
        if not self.remembered:
            return None
        probabilities = np.empty((OCTAVES, 1 + len(self.remembered)))
        probabilities[:, 0] = self.current.octave_probabilities()
        probabilities[:, 1:] = self.remembered_curves().octave_probabilities
        probabilities *= self._predict_probabilities(
            self.hazard_estimator.shift_probability_on_move
        )
        if self.octave >= 0:
            probabilities[self.octave] = self._predict_probabilities(
                self.hazard_estimator.shift_probability
            )
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        is_certain = probabilities[:, 0].min() >= 1 - self._settings.negligible_probability
        return None if is_certain else probabilities


def _probability(state: TrafficState) -> float:
    return state.probability
