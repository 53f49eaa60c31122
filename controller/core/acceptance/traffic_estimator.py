"""Estimates acceptance by drafter, and by request class for engines that report classes.

A batch is valued as a mix of its classes: E[accepted | gamma] is their mean, weighted by the number
of sequences of each class in the last step.  Without classes it is the drafter's estimate over all
traffic, in the current traffic state (`traffic_state`).  For batches of another size, it is the
estimate of the states in which such batches were observed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.acceptance.traffic_state import EarlierVisit, RememberedCurves, octaves_of
from controller.core.acceptance.traffic_state_tracker import TrafficStateTracker
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Further classes are estimated as part of all traffic, until one of these is unused.
MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class TrafficCurves:
    """Holds the acceptance of an engine's traffic at one moment.

    all_traffic: of all traffic, by drafter.  by_class: of each request class, by label and drafter.
    last_batch: of the last batch (its classes mixed), by drafter.  remembered: of the remembered
    traffic states.  state_probabilities: [octaves, states], probability of the current and each
    remembered state for a batch of that size; None: the current state is certain.  octave,
    batch_size: of the last batch. earlier_visit: the last visit of the current traffic state, None
    if it is new.  undrafted_share: share of the rows that no arm drafts for, because their requests
    opted out.
    """

    all_traffic: Mapping[str, AcceptanceCurve]
    by_class: Mapping[str, Mapping[str, AcceptanceCurve]]
    last_batch: Mapping[str, AcceptanceCurve]
    remembered: RememberedCurves | None = None
    state_probabilities: NDArray[np.float64] | None = None
    octave: int = 0
    earlier_visit: EarlierVisit | None = None
    batch_size: int = 0
    undrafted_share: float = 0.0

    def expected_accepted_by_state(self, arms: Sequence[Arm]) -> NDArray[np.float64]:
        """Returns the expected accepted tokens, [states, arms]; states as `state_probabilities`."""
        accepted = np.array(
            [[self.all_traffic[arm.drafter].expected_accepted[arm.gamma] for arm in arms]]
        )
        if self.remembered is not None:
            accepted = np.concatenate([accepted, self.remembered.expected_accepted(arms)])
        return accepted * (1 - self.undrafted_share) if self.undrafted_share else accepted

    def expected_accepted(
        self, arms: Sequence[Arm], batch_sizes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns [arms, rows], the expected accepted draft tokens of a sequence.

        batch_sizes: [rows], ascending upper ends.
        """
        if self.state_probabilities is None:
            accepted = np.array(
                [self.last_batch[arm.drafter].expected_accepted[arm.gamma] for arm in arms]
            )
            if self.undrafted_share:
                accepted *= 1 - self.undrafted_share
            accepted_by_row = np.empty((len(arms), len(batch_sizes)))
            accepted_by_row[:] = accepted[:, None]
            return accepted_by_row
        octaves = octaves_of(batch_sizes)
        # The row of the last batch may end in the next octave.
        row = int(batch_sizes.searchsorted(self.batch_size))
        if row < len(octaves):
            octaves[row] = self.octave
        mixed: NDArray[np.float64] = (
            self.state_probabilities[octaves] @ self.expected_accepted_by_state(arms)
        ).T
        return mixed


@recorded(
    "traffic_estimator",
    "classes _batch_size",
    added="_used_at",
    states="state_tracker",
    awaited="_pending_warm_starts",
    mix="_class_shares",
    undrafted="_undrafted_share",
    used_at="_last_used_step",
)
class TrafficEstimator:
    """Owns all acceptance estimators of one engine.

    `observe`, `warm_start_from` and `commit` change it; `curves` and `acceptance_snapshots` read
    it.
    """

    def __init__(self, drafters: Sequence[DrafterSpec], settings: PlannerSettings) -> None:
        self._settings = settings
        self.state_tracker = TrafficStateTracker(
            {d.name: max(d.gammas[-1], 1) for d in drafters}, settings
        )
        self.classes: dict[str, dict[str, AcceptanceEstimator]] = {}
        # The step of each class's last report.
        self._last_used_step: dict[str, int] = {}
        # Warm-start estimates of classes that have not been reported yet: by label and drafter.
        self._pending_warm_starts: dict[str, dict[str, AcceptanceSnapshot]] = {}
        self._class_shares: dict[str, float] = {}
        # From the last report.
        self._batch_size = 0
        self._undrafted_share = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        self.state_tracker.use_settings(settings)
        for estimators in self.classes.values():
            for estimator in estimators.values():
                estimator.use_settings(settings)

    @property
    def estimators(self) -> Mapping[str, AcceptanceEstimator]:
        """Returns the estimators of all traffic in its current state, by drafter."""
        return self.state_tracker.current.estimators

    @property
    def shift_probabilities(self) -> ShiftProbabilities:
        """Returns the probability that the traffic shifts in one step."""
        return self.state_tracker.hazard_estimator.probabilities

    @property
    def shifts(self) -> int:
        """Number of traffic shifts detected so far."""
        return self.state_tracker.shifts

    def observe(self, report: StepReport, now: float = 0.0) -> bool:
        """Adds a report's accepted counts and those of its classes; True on a shift of traffic.

        now: clock seconds, recorded as the times of visits to traffic states.
        """
        self._batch_size = report.batch_size
        self._undrafted_share = report.undrafted_share if report.groups else 0.0
        has_shifted = self.state_tracker.observe(report, now)
        if report.classes or self._class_shares:
            self._observe_classes(report)
        return has_shifted

    def _observe_classes(self, report: StepReport) -> None:
        self._class_shares = {}
        # Only rows that did not opt out of drafting belong to classes.
        drafted_rows = report.batch_size * (1 - self._undrafted_share) - report.ended_rows
        drafted_rows = max(1.0, drafted_rows)
        for class_counts in report.classes:
            estimators = self.classes.get(class_counts.label)
            if estimators is None:
                if not self._ensure_class_slot(report.step):
                    continue
                estimators = self.add_class(class_counts.label)
                for snapshot in self._pending_warm_starts.pop(class_counts.label, {}).values():
                    estimators[snapshot.drafter].warm_start_from(
                        snapshot.conditional, snapshot.exposures
                    )
            for name, estimator in estimators.items():
                if name == report.drafter:
                    if estimator.observe(
                        class_counts.accepted_counts, class_counts.censored_counts
                    ):
                        estimator.reset_after_shift()
                else:
                    estimator.observe_idle_step()
            rows = sum(class_counts.accepted_counts) + sum(class_counts.censored_counts)
            self._class_shares[class_counts.label] = rows / drafted_rows
            self._last_used_step[class_counts.label] = report.step

    def _ensure_class_slot(self, step: int) -> bool:
        """Returns whether one more class can be estimated; removes the longest unused one."""
        if len(self.classes) < MAX_CLASSES:
            return True
        longest_unused = min(self.classes, key=lambda label: self._last_used_step.get(label, 0))
        if step - self._last_used_step.get(longest_unused, 0) < self._settings.class_unused_steps:
            return False
        del self.classes[longest_unused]
        self._last_used_step.pop(longest_unused, None)
        return True

    def add_class(self, label: str) -> dict[str, AcceptanceEstimator]:
        """Adds estimators for a request class; returns them by drafter."""
        self._last_used_step[label] = 0
        self.classes[label] = {
            name: AcceptanceEstimator(
                main_estimator.gamma_max, self._settings, main_estimator.shift_kinds
            )
            for name, main_estimator in self.estimators.items()
        }
        return self.classes[label]

    def acceptance_snapshots(self) -> list[AcceptanceSnapshot]:
        """Returns the estimates for another session's warm start."""
        curves = self.curves()
        snapshots = []
        for label, by_drafter in {"": curves.all_traffic, **curves.by_class}.items():
            for name, curve in by_drafter.items():
                if curve.exposures and curve.exposures[0] > 0:
                    snapshots.append(
                        AcceptanceSnapshot(
                            name, label, tuple(curve.conditional), tuple(curve.exposures)
                        )
                    )
        return snapshots

    def warm_start_from(self, snapshots: Iterable[AcceptanceSnapshot]) -> None:
        """Adds estimates of other sessions, except for drafters that this engine lacks."""
        for snapshot in snapshots:
            if snapshot.drafter not in self.estimators:
                continue
            if snapshot.label and snapshot.label not in self.classes:
                self._pending_warm_starts.setdefault(snapshot.label, {})[snapshot.drafter] = (
                    snapshot
                )
                continue
            estimators = self.classes[snapshot.label] if snapshot.label else self.estimators
            estimators[snapshot.drafter].warm_start_from(snapshot.conditional, snapshot.exposures)

    def curves(self) -> TrafficCurves:
        """Returns the present estimates."""
        return self._make_curves(self.state_tracker.curves(), AcceptanceEstimator.curve)

    def commit(self) -> TrafficCurves:
        """Returns the present estimates, and makes them the reference of the tests for shifts."""
        return self._make_curves(self.state_tracker.commit(), AcceptanceEstimator.commit)

    def _make_curves(
        self,
        main_curves: Mapping[str, AcceptanceCurve],
        curve_of: Callable[[AcceptanceEstimator, AcceptanceCurve | None], AcceptanceCurve],
    ) -> TrafficCurves:
        classes = {
            label: {
                name: curve_of(per_class, main_curves[name])
                for name, per_class in estimators.items()
            }
            for label, estimators in self.classes.items()
        }
        earlier_visit = self.state_tracker.current.earlier_visit
        if not self._class_shares:
            state_probabilities = self.state_tracker.state_probabilities()
            remembered = (
                self.state_tracker.remembered_curves() if state_probabilities is not None else None
            )
            return TrafficCurves(
                main_curves, classes, main_curves, remembered, state_probabilities,
                self.state_tracker.octave, earlier_visit,
                self._batch_size, self._undrafted_share,
            )  # fmt: skip
        mixed_curves, unclassified_share = {}, max(0.0, 1 - sum(self._class_shares.values()))
        for name, curve in main_curves.items():
            expected_accepted = [unclassified_share * value for value in curve.expected_accepted]
            for label, share in self._class_shares.items():
                per_class = classes[label][name].expected_accepted
                expected_accepted = [
                    expected + share * class_expected
                    for expected, class_expected in zip(expected_accepted, per_class, strict=True)
                ]
            mixed_curves[name] = dataclasses.replace(curve, expected_accepted=expected_accepted)
        return TrafficCurves(
            main_curves,
            classes,
            mixed_curves,
            earlier_visit=earlier_visit,
            undrafted_share=self._undrafted_share,
        )
