"""Estimates acceptance by drafter, and by request class for engines that report classes.

A batch is valued as a mix of its classes: E[accepted | gamma] is their mean, weighted by the number
of sequences of each class in the last step.  Without classes it is the drafter's estimate over all
traffic, in the current traffic state (`traffic_states`).  For batches of another size, it is the
estimate of the states in which such batches were observed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.shifts import Hazard
from controller.core.acceptance.traffic_state import RememberedCurves, Resemblance, octaves_of
from controller.core.acceptance.traffic_states import TrafficStates
from controller.core.acceptance.warm_start import Belief
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Further classes are estimated as part of all traffic, until one of these is unused.
MAX_CLASSES = 8
# Steps after which an unused class can be replaced: at 20 ms a step, 20 s.
UNUSED_STEPS = 1000


@dataclass(frozen=True, slots=True)
class TrafficCurves:
    """Holds the acceptance of an engine's traffic at one moment.

    drafters: of all traffic, by drafter.  classes: of each request class, by label and drafter.
    batch: of the last batch (its classes mixed), by drafter.  remembered: of the remembered traffic
    states.  likely: [octaves, states], probability of the current and each remembered state for a
    batch of that size; None: the current state is certain.  octave, batch_size: of the last batch.
    resembles: the last visit of the current traffic state, None if it is new.  undrafted: share of
    the rows that no arm drafts for, because their requests opted out.
    """

    drafters: Mapping[str, AcceptanceCurve]
    classes: Mapping[str, Mapping[str, AcceptanceCurve]]
    batch: Mapping[str, AcceptanceCurve]
    remembered: RememberedCurves | None = None
    likely: NDArray[np.float64] | None = None
    octave: int = 0
    resembles: Resemblance | None = None
    batch_size: int = 0
    undrafted: float = 0.0

    def by_state(self, arms: Sequence[Arm]) -> NDArray[np.float64]:
        """Returns [states, arms], the expected accepted draft tokens; states as in `likely`."""
        own = np.array([[self.drafters[arm.drafter].expected[arm.gamma] for arm in arms]])
        if self.remembered is not None:
            own = np.concatenate([own, self.remembered.expected(arms)])
        return own * (1 - self.undrafted) if self.undrafted else own

    def expected(
        self, arms: Sequence[Arm], batch_sizes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns [arms, rows], the expected accepted draft tokens of a sequence.

        batch_sizes: [rows], ascending upper ends.
        """
        if self.likely is None:
            own = np.array([self.batch[arm.drafter].expected[arm.gamma] for arm in arms])
            if self.undrafted:
                own *= 1 - self.undrafted
            return np.repeat(own[:, None], len(batch_sizes), axis=1)
        octaves = octaves_of(batch_sizes)
        # The row of the last batch may end in the next octave.
        row = int(batch_sizes.searchsorted(self.batch_size))
        if row < len(octaves):
            octaves[row] = self.octave
        mixed: NDArray[np.float64] = (self.likely[octaves] @ self.by_state(arms)).T
        return mixed


@recorded(
    "traffic_estimator", "states classes _awaited _batch_size _mix _undrafted", added="_used_at"
)
class TrafficEstimator:
    """Owns all acceptance estimators of one engine.

    `fold`, `begin_from` and `believe` change it; `curves` and `beliefs` read it.
    """

    def __init__(self, drafters: Sequence[DrafterSpec], settings: PlannerSettings) -> None:
        self._settings = settings
        self.states = TrafficStates({d.name: max(d.gammas[-1], 1) for d in drafters}, settings)
        self.classes: dict[str, dict[str, AcceptanceEstimator]] = {}
        # The step of each class's last report.
        self._used_at: dict[str, int] = {}
        # Warm-start estimates of classes that have not been reported yet: by label and drafter.
        self._awaited: dict[str, dict[str, Belief]] = {}
        self._mix: dict[str, float] = {}
        # From the last report.
        self._batch_size = 0
        self._undrafted = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        self.states.use_settings(settings)
        for estimators in self.classes.values():
            for estimator in estimators.values():
                estimator.use_settings(settings)

    @property
    def drafters(self) -> Mapping[str, AcceptanceEstimator]:
        """Returns the estimators of all traffic in its current state, by drafter."""
        return self.states.current.drafters

    @property
    def hazard(self) -> Hazard:
        """Returns the probability that the traffic shifts in one step."""
        return self.states.hazards.hazard

    @property
    def shifts(self) -> int:
        """Number of traffic shifts detected so far."""
        return self.states.shifts

    def fold(self, report: StepReport, now: float = 0.0) -> bool:
        """Adds a report's accepted counts and those of its classes; True on a shift of traffic.

        now: clock seconds, recorded as the times of visits to traffic states.
        """
        self._batch_size = report.batch_size
        self._undrafted = report.undrafted_share if report.groups else 0.0
        shifted = self.states.fold(report, now)
        if report.classes or self._mix:
            self._fold_classes(report)
        return shifted

    def _fold_classes(self, report: StepReport) -> None:
        self._mix = {}
        # Only rows that did not opt out of drafting belong to classes.
        drafted = report.batch_size * (1 - self._undrafted) - report.ended_rows
        drafted = max(1.0, drafted)
        for part in report.classes:
            known = self.classes.get(part.label)
            if known is None:
                if not self._has_room(report.step):
                    continue
                known = self.admit(part.label)
                for belief in self._awaited.pop(part.label, {}).values():
                    known[belief.drafter].begin_from(belief.conditional, belief.exposures)
            for name, estimator in known.items():
                if name == report.drafter:
                    if estimator.fold(part.accepted_counts, part.censored_counts):
                        estimator.forget()
                else:
                    estimator.pass_by()
            rows = sum(part.accepted_counts) + sum(part.censored_counts)
            self._mix[part.label] = rows / drafted
            self._used_at[part.label] = report.step

    def _has_room(self, step: int) -> bool:
        """Returns whether one more class can be estimated; removes the longest unused one."""
        if len(self.classes) < MAX_CLASSES:
            return True
        unused = min(self.classes, key=lambda label: self._used_at.get(label, 0))
        if step - self._used_at.get(unused, 0) < UNUSED_STEPS:
            return False
        del self.classes[unused]
        self._used_at.pop(unused, None)
        return True

    def admit(self, label: str) -> dict[str, AcceptanceEstimator]:
        """Adds estimators for a request class; returns them by drafter."""
        self._used_at[label] = 0
        self.classes[label] = {
            name: AcceptanceEstimator(main.gamma_max, self._settings, main.changes)
            for name, main in self.drafters.items()
        }
        return self.classes[label]

    def beliefs(self) -> list[Belief]:
        """Returns the estimates for another session's warm start."""
        curves = self.curves()
        found = []
        for label, by_drafter in {"": curves.drafters, **curves.classes}.items():
            for name, curve in by_drafter.items():
                if curve.exposures and curve.exposures[0] > 0:
                    found.append(
                        Belief(name, label, tuple(curve.conditional), tuple(curve.exposures))
                    )
        return found

    def begin_from(self, beliefs: Iterable[Belief]) -> None:
        """Adds estimates of other sessions, except for drafters that this engine lacks."""
        for belief in beliefs:
            if belief.drafter not in self.drafters:
                continue
            if belief.label and belief.label not in self.classes:
                self._awaited.setdefault(belief.label, {})[belief.drafter] = belief
                continue
            estimators = self.classes[belief.label] if belief.label else self.drafters
            estimators[belief.drafter].begin_from(belief.conditional, belief.exposures)

    def curves(self) -> TrafficCurves:
        """Returns the present estimates."""
        return self._curves(self.states.curves(), AcceptanceEstimator.curve)

    def believe(self) -> TrafficCurves:
        """Returns the present estimates, and makes them the reference of the tests for shifts."""
        return self._curves(self.states.believe(), AcceptanceEstimator.believe)

    def _curves(
        self,
        mains: Mapping[str, AcceptanceCurve],
        curve_of: Callable[[AcceptanceEstimator, AcceptanceCurve | None], AcceptanceCurve],
    ) -> TrafficCurves:
        classes = {
            label: {name: curve_of(own, mains[name]) for name, own in estimators.items()}
            for label, estimators in self.classes.items()
        }
        resembles = self.states.current.resemblance
        if not self._mix:
            likely = self.states.weights()
            remembered = self.states.remembered_curves() if likely is not None else None
            return TrafficCurves(
                mains, classes, mains, remembered, likely, self.states.octave, resembles,
                self._batch_size, self._undrafted,
            )  # fmt: skip
        batch, rest = {}, max(0.0, 1 - sum(self._mix.values()))
        for name, curve in mains.items():
            expected = [rest * value for value in curve.expected]
            for label, share in self._mix.items():
                own = classes[label][name].expected
                expected = [e + share * o for e, o in zip(expected, own, strict=True)]
            batch[name] = dataclasses.replace(curve, expected=expected)
        return TrafficCurves(mains, classes, batch, resembles=resembles, undrafted=self._undrafted)
