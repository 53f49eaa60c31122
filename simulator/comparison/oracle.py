"""Policies that know the true values; the oracle is the best of them and of the static arms.

None of them is optimal by construction, because the best arm of a step is not always the best
choice if a switch has a cost.  So several are run, and the one with the best score is the oracle.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controller.core.plan import MixtureRule
from simulator.comparison.contestants import Factory, static_names
from simulator.comparison.truth import Truth
from simulator.engine import EngineOptions, RunResult
from simulator.policy import ArmChoice, Situation, StepRecord
from simulator.results import PolicyOrigin
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import CostSurface
from simulator.workload import OpenLoop, Workload

# A patient policy switches after it has lost this share of the switch's cost by staying.
_PATIENCE_SHARES = (0.3, 1.0)


class SegmentSchedule:
    """Uses one arm per segment of the workload; the situation contains the segment."""

    origin = PolicyOrigin.HINDSIGHT

    def __init__(self, arm_by_segment: Sequence[int], rules: Sequence[MixtureRule] = ()) -> None:
        self._arms = [ArmChoice(arm, rules=rules) for arm in arm_by_segment]
        self._current = self._arms[0]

    def set_situation(self, situation: Situation) -> None:
        """Selects the segment's arm; the last arm is used beyond the known segments."""
        self._current = self._arms[min(situation.segment, len(self._arms) - 1)]

    def choose(self, _batch_size: int, _now: float) -> ArmChoice:
        """Returns the segment's arm."""
        return self._current

    def observe(self, record: StepRecord, now: float) -> None:
        """Nothing is learnt: everything is known."""


class BestArm:
    """The arm of the highest true value at every step's batch, context and running requests.

        value = (1 + E[accepted | arm]) / C(arm, n, kv)

    expected: [kinds, arms] of E[accepted | arm], see `Truth`.  If several kinds run together, 1 + E
    is their geometric mean: a slow request occupies its place longer, so a token of it is worth
    more than a token of a fast request, in proportion to the time.  The arithmetic mean favours
    fast requests and leaves the slow ones in the batch.

    rules: of mixtures.  drafter: the only one that may draft; None: any.  asleep: at gamma = 0 no
    drafter stays awake; otherwise the step costs `warm_factor`.

    patience: 0 switches whenever another arm is better in this step.  Above 0, it switches once an
    arm would have saved, since the last switch, this share of the seconds that a switch to it costs
    now (ski-rental rule).
    """

    origin = PolicyOrigin.HINDSIGHT

    def __init__(
        self,
        surface: CostSurface,
        options: EngineOptions,
        expected: NDArray[np.float64],
        rules: Sequence[MixtureRule] = (),
        *,
        drafter: str | None = None,
        asleep: bool = True,
        patience: float = 0.0,
    ) -> None:
        arms = surface.arms
        self._surface = surface
        self._single_kind_tokens: NDArray[np.float64] = 1.0 + expected[0]
        self._log_tokens = np.log(1.0 + expected)
        self._patience = patience
        self._is_plain = np.array([arm.gamma == 0 for arm in arms])
        self._warm_factors = np.where(self._is_plain & (not asleep), options.warm_factor, 1.0)
        is_barred = [arm.gamma > 0 and drafter not in {None, arm.drafter} for arm in arms]
        self._allowed = np.where(is_barred, 0.0, 1.0)
        names = [spec.name for spec in surface.drafters]
        self._drafter_by_arm = np.array([names.index(arm.drafter) for arm in arms])
        self._switch_seconds = options.switch_seconds
        self._choices = [ArmChoice(i, asleep=asleep, rules=rules) for i in range(len(arms))]
        self._saved_seconds = np.zeros(len(arms))
        self._last_arm = -1
        self._situation: Situation | None = None

    def set_situation(self, situation: Situation) -> None:
        """Receives the situation of the next step."""
        self._situation = situation

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the best arm, or the current one while a switch does not pay yet."""
        situation = self._situation
        assert situation is not None, "the engine shows a clairvoyant policy the situation first"
        seconds = self._surface.step_seconds(batch_size, situation.kv_tokens) * self._warm_factors
        value = self._tokens_per_sequence(situation.running) * self._allowed / seconds
        best = int(value.argmax())
        if self._patience and self._last_arm >= 0:
            best = self._choose_patiently(value, seconds, situation.catch_up_seconds)
        if best != self._last_arm:
            self._saved_seconds[:] = 0.0
            self._last_arm = best
        return self._choices[best]

    def _tokens_per_sequence(self, running: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [arms] tokens per sequence in this step, the mean over the running kinds."""
        if len(running) == 1:
            return self._single_kind_tokens
        mean: NDArray[np.float64] = np.exp(running @ self._log_tokens / running.sum())
        return mean

    def _choose_patiently(
        self, value: NDArray[np.float64], seconds: NDArray[np.float64], catch_up: Sequence[float]
    ) -> int:
        """Adds what every arm would have saved in this step; switches if one has paid off."""
        saved = seconds[self._last_arm] * (1.0 - value[self._last_arm] / np.maximum(value, 1e-300))
        np.maximum(self._saved_seconds + saved, 0.0, out=self._saved_seconds)
        price = np.where(self._is_plain, 0.0, np.array(catch_up)[self._drafter_by_arm])
        gain = self._saved_seconds - self._patience * (self._switch_seconds + price)
        gain[self._last_arm] = 0.0
        return int(gain.argmax())

    def observe(self, record: StepRecord, now: float) -> None:
        """Nothing is learnt: everything is known."""


def best_by_segment(
    static_runs: Sequence[RunResult], classes: Sequence[int] | None = None
) -> list[int]:
    """Returns per segment the arm with the most tokens per second in its own static run.

    classes: [segments]; segments of equal class get the same arm.  None: all differ.
    """
    segments = max(len(run.segment_tokens) for run in static_runs)
    class_by_segment = list(range(segments)) if classes is None else list(classes)[:segments]
    tokens = np.zeros((len(static_runs), max(class_by_segment) + 1))
    seconds = np.zeros_like(tokens)
    for i, run in enumerate(static_runs):
        run_classes = class_by_segment[: len(run.segment_tokens)]
        np.add.at(tokens[i], run_classes, run.segment_tokens)
        np.add.at(seconds[i], run_classes, run.segment_seconds)
    rates = np.divide(tokens, seconds, out=np.zeros_like(tokens), where=seconds > 0)
    best = rates.argmax(axis=0)
    return [int(best[segment_class]) for segment_class in class_by_segment]


def segment_classes(workload: Workload) -> list[int] | None:
    """Returns a class number per phase: equal for phases with the same pool and concurrency."""
    if isinstance(workload, OpenLoop):
        return None
    numbers: dict[tuple[int, int], int] = {}
    return [
        numbers.setdefault((id(phase.pool), phase.concurrency), len(numbers))
        for phase in workload.phases
    ]


def clairvoyant_factories(
    surface: CostSurface,
    options: EngineOptions,
    expected: NDArray[np.float64],
    rules: Sequence[MixtureRule] = (),
) -> dict[str, Factory]:
    """Makes the policies that know the true values; only those that differ on this engine.

    expected, rules: see `BestArm`.
    """
    drafters = [spec.name for spec in surface.drafters]
    has_catch_up_cost = surface.catch_up_seconds(1.0) > 0
    has_switch_cost = options.switch_seconds > 0 or has_catch_up_cost
    make_best_arm = partial(BestArm, surface, options, expected, rules)
    factories: dict[str, Factory] = {"best arm": make_best_arm}
    if has_switch_cost and len(drafters) > 1:
        factories |= {
            f"only {drafter}": partial(make_best_arm, drafter=drafter) for drafter in drafters
        }
    if has_catch_up_cost or options.stale_steps > 0:
        factories["awake"] = partial(make_best_arm, asleep=False)
    if has_switch_cost:
        factories |= {
            f"patience {share:g}": partial(make_best_arm, patience=share)
            for share in _PATIENCE_SHARES
        }
    return factories


def oracle_factories(
    scenario: Scenario, workload: Workload, truth: Truth, static_runs: Mapping[str, RunResult]
) -> dict[str, Factory]:
    """Makes the policies that compete with the static arms to be the oracle.

    static_runs: of every static arm, in the order of `static_names`.
    """
    factories = clairvoyant_factories(
        scenario.surface, scenario.options, truth.expected_by_pool(), truth.rules
    )
    index = list(static_names(scenario.surface).values())
    best = best_by_segment(list(static_runs.values()), segment_classes(workload))
    schedule = [index[i] for i in best]
    if len(set(schedule)) > 1:
        factories["schedule"] = partial(SegmentSchedule, schedule, truth.rules)
    return factories


def by_request_factories(scenario: Scenario, truth: Truth) -> dict[str, Factory]:
    """Makes the policies that know the kind of every running request; {} if all are alike."""
    if not truth.has_mixed_kinds:
        return {}
    return clairvoyant_factories(
        scenario.surface, scenario.options, truth.expected_by_kind(), truth.rules
    )
