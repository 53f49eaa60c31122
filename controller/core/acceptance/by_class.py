"""Estimates acceptance by drafter, and by request class for engines that report classes.

A batch is valued as a mix of its classes: E[accepted | gamma] is their mean, weighted by how many
sequences of each class ran in the last step.  Without classes it is the drafter's estimate over all
traffic.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.core.acceptance.cusum import Hazard
from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.warm_start import Belief
from controller.core.engine_spec import DrafterSpec
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Shifts are expected once in so many steps before any was seen; how long their rate is remembered.
_HAZARD_PRIOR_STEPS = 2000.0
_HAZARD_MEMORY_STEPS = 20_000.0
# Shifts in one direction that follow one another sooner are one change that takes a while: a batch
# that drains, say, whose last requests are those that accept least.
_ONE_CHANGE_STEPS = 100
# Classes beyond these are estimated as part of all traffic.
MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class TrafficCurves:
    """Holds the acceptance of an engine's traffic at one moment.

    drafters: of all traffic, by drafter.  classes: of each request class, by label and drafter.
    batch: of the batch that ran last (its classes mixed), by drafter.
    """

    drafters: Mapping[str, AcceptanceCurve]
    classes: Mapping[str, Mapping[str, AcceptanceCurve]]
    batch: Mapping[str, AcceptanceCurve]


@recorded(
    "traffic_estimator",
    "drafters classes _awaited _hazard_shifts _hazard_better _hazard_steps _mix _since_shift "
    "_direction",
)
class TrafficEstimator:
    """Owns all acceptance estimators of one engine.

    `fold`, `begin_from` and `believe` change it; `curves` and `beliefs` read it.
    """

    def __init__(self, drafters: Sequence[DrafterSpec], settings: PlannerSettings) -> None:
        self._settings = settings
        self.drafters = {
            d.name: AcceptanceEstimator(max(d.gammas[-1], 1), settings) for d in drafters
        }
        self.classes: dict[str, dict[str, AcceptanceEstimator]] = {}
        # Warm-start estimates of classes that have not been reported yet: by label and drafter.
        self._awaited: dict[str, dict[str, Belief]] = {}
        self._mix: dict[str, float] = {}
        self._hazard_steps = _HAZARD_PRIOR_STEPS
        # Changes of traffic, and those to more accepted drafts.
        self._hazard_shifts = self._hazard_better = 0.0
        # Steps since the last shift, and its direction.
        self._since_shift = self._direction = 0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        for estimators in (self.drafters, *self.classes.values()):
            for estimator in estimators.values():
                estimator.use_settings(settings)

    @property
    def hazard(self) -> Hazard:
        """Returns the probability that the traffic shifts in one step."""
        expected = (1 + self._hazard_shifts) / self._hazard_steps
        return Hazard(expected, self._hazard_better / self._hazard_steps)

    @property
    def shifts(self) -> int:
        """Counts the shifts of traffic that were detected so far."""
        return sum(estimator.shifts for estimator in self.drafters.values())

    def fold(self, report: StepReport) -> bool:
        """Takes a report's accepted counts and those of its classes; True on a shift of traffic."""
        for name, estimator in self.drafters.items():
            if name != report.drafter:
                estimator.pass_by()
        direction = self.drafters[report.drafter].fold(report.accepted_counts)
        self._hazard_steps += 1
        self._since_shift += 1
        if self._hazard_steps > _HAZARD_MEMORY_STEPS:
            keep = _HAZARD_MEMORY_STEPS / self._hazard_steps
            self._hazard_steps *= keep
            self._hazard_shifts *= keep
            self._hazard_better *= keep
        if direction:
            goes_on = direction == self._direction and self._since_shift <= _ONE_CHANGE_STEPS
            if not goes_on:
                self._hazard_shifts += 1
                self._hazard_better += direction > 0
            self._since_shift, self._direction = 0, direction
            # What was learnt of a drafter under other traffic is worth less under this one.
            for name, estimator in self.drafters.items():
                if name != report.drafter:
                    estimator.doubt()
        if report.classes or self._mix:
            self._fold_classes(report)
        return direction != 0

    def _fold_classes(self, report: StepReport) -> None:
        self._mix = {}
        for part in report.classes:
            known = self.classes.get(part.label)
            if known is None:
                if len(self.classes) >= MAX_CLASSES:
                    continue
                known = self.admit(part.label)
                for belief in self._awaited.pop(part.label, {}).values():
                    known[belief.drafter].begin_from(belief.conditional, belief.exposures)
            for name, estimator in known.items():
                if name == report.drafter:
                    estimator.fold(part.accepted_counts)
                else:
                    estimator.pass_by()
            self._mix[part.label] = sum(part.accepted_counts) / report.batch_size

    def admit(self, label: str) -> dict[str, AcceptanceEstimator]:
        """Estimates a request class by itself from now on; returns its estimators by drafter."""
        self.classes[label] = {
            name: AcceptanceEstimator(main.gamma_max, self._settings)
            for name, main in self.drafters.items()
        }
        return self.classes[label]

    def beliefs(self) -> list[Belief]:
        """Returns the estimates from which another session can begin."""
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
        """Adds estimates of other sessions; leaves out those of drafters that this engine lacks."""
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
        return self._curves(AcceptanceEstimator.curve)

    def believe(self) -> TrafficCurves:
        """Returns the present estimates and tests later steps against them; for a decision."""
        return self._curves(AcceptanceEstimator.believe)

    def _curves(
        self, curve_of: Callable[[AcceptanceEstimator, AcceptanceCurve | None], AcceptanceCurve]
    ) -> TrafficCurves:
        mains = {name: curve_of(estimator, None) for name, estimator in self.drafters.items()}
        classes = {
            label: {name: curve_of(own, mains[name]) for name, own in estimators.items()}
            for label, estimators in self.classes.items()
        }
        if not self._mix:
            return TrafficCurves(mains, classes, mains)
        batch, rest = {}, max(0.0, 1 - sum(self._mix.values()))
        for name, curve in mains.items():
            expected = [rest * value for value in curve.expected]
            for label, share in self._mix.items():
                own = classes[label][name].expected
                expected = [e + share * o for e, o in zip(expected, own, strict=True)]
            batch[name] = dataclasses.replace(curve, expected=expected)
        return TrafficCurves(mains, classes, batch)
