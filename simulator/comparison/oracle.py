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
from simulator.policy import ArmChoice, NonLearningPolicy, Situation
from simulator.results import PolicyOrigin
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import MIN_COST_SHARE, CostSurface
from simulator.workload import OpenLoop, Workload

BEST_ARM = "best arm"
_AWAKE, _ONLY, _PATIENCE = "awake", "only ", "patience "
# A patient policy switches after it has lost this share of the switch's cost by staying.
_PATIENCE_SHARES = (0.3, 1.0)


class SegmentSchedule(NonLearningPolicy):
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


class BestArm(NonLearningPolicy):
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
        self._is_plain = [arm.gamma == 0 for arm in arms]
        is_barred = [arm.gamma > 0 and drafter not in {None, arm.drafter} for arm in arms]
        self._allowed = np.where(is_barred, 0.0, 1.0)
        names = [spec.name for spec in surface.drafters]
        # By arm, the drafter that has to catch up, or the number of drafters at gamma = 0.
        self._catching_up = [names.index(a.drafter) if a.gamma else len(names) for a in arms]
        self._switch_seconds = options.switch_seconds
        self._choices = [ArmChoice(i, asleep=asleep, rules=rules) for i in range(len(arms))]
        self._saved_seconds = [0.0] * len(arms)
        self._last_arm = -1
        self._situation: Situation | None = None
        warm_factors = np.where(self._is_plain, 1.0 if asleep else options.warm_factor, 1.0)
        # Plain lists, because there are few arms: [batch sizes][arms] and [arms].
        self._seconds: list[list[float]] = (surface.seconds.T * warm_factors).tolist()
        self._kv_seconds: list[float] = (surface.kv_seconds * warm_factors).tolist()
        # By the numbers of running sequences of each kind.
        self._tokens_by_running: dict[tuple[int, ...], list[float]] = {}

    def set_situation(self, situation: Situation) -> None:
        """Receives the situation of the next step."""
        self._situation = situation

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the best arm, or the current one while a switch does not pay yet."""
        situation = self._situation
        assert situation is not None, "the engine shows a clairvoyant policy the situation first"
        running = situation.running
        tokens = self._tokens_by_running.get(running) or self._tokens_per_sequence(running)
        seconds = self._step_seconds(batch_size, situation.kv_tokens)
        values = [t / s for t, s in zip(tokens, seconds, strict=True)]
        best = values.index(max(values))
        if self._patience and self._last_arm >= 0 and self._may_leave(best):
            best = self._choose_patiently(values, seconds, situation.catch_up_seconds)
        if best != self._last_arm:
            self._saved_seconds = [0.0] * len(values)
            self._last_arm = best
        return self._choices[best]

    def _step_seconds(self, batch_size: int, kv_tokens: int) -> list[float]:
        """Returns [arms] seconds, as `CostSurface.step_seconds`, of the drafters as they are."""
        reference_seconds = self._seconds[batch_size]
        kv = kv_tokens - batch_size * self._surface.kv_reference
        seconds = [s + k * kv for s, k in zip(reference_seconds, self._kv_seconds, strict=True)]
        if kv >= 0:
            return seconds
        return [
            max(s, MIN_COST_SHARE * least)
            for s, least in zip(seconds, reference_seconds, strict=True)
        ]

    def _tokens_per_sequence(self, running: tuple[int, ...]) -> list[float]:
        """Returns [arms] tokens per sequence in this step, the mean over the running kinds.

        An arm that may not draft has 0.
        """
        mean = self._single_kind_tokens
        if len(running) > 1:
            mean = np.exp(np.array(running) @ self._log_tokens / sum(running))
        tokens: list[float] = (mean * self._allowed).tolist()
        self._tokens_by_running[running] = tokens
        return tokens

    def _may_leave(self, best: int) -> bool:
        """Whether an arm has saved something, may do so in this step, or costs no switch."""
        return best != self._last_arm or any(self._saved_seconds) or self._switch_seconds <= 0

    def _choose_patiently(
        self, values: Sequence[float], seconds: Sequence[float], catch_up: Sequence[float]
    ) -> int:
        """Adds what every arm would have saved in this step; switches if one has paid off."""
        last = self._last_arm
        last_seconds, last_value = seconds[last], values[last]
        self._saved_seconds = [
            max(saved + last_seconds * (1.0 - last_value / max(value, 1e-300)), 0.0)
            for saved, value in zip(self._saved_seconds, values, strict=True)
        ]
        # At gamma = 0 no drafter has to catch up.
        prices = [self._patience * (self._switch_seconds + price) for price in (*catch_up, 0.0)]
        gains = [
            saved - prices[i]
            for saved, i in zip(self._saved_seconds, self._catching_up, strict=True)
        ]
        gains[last] = 0.0
        return gains.index(max(gains))


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
    factories: dict[str, Factory] = {BEST_ARM: make_best_arm}
    if has_switch_cost and len(drafters) > 1:
        factories |= {
            _ONLY + drafter: partial(make_best_arm, drafter=drafter) for drafter in drafters
        }
    if has_catch_up_cost or options.stale_steps > 0:
        factories[_AWAKE] = partial(make_best_arm, asleep=False)
    if has_switch_cost:
        factories |= {
            f"{_PATIENCE}{share:g}": partial(make_best_arm, patience=share)
            for share in _PATIENCE_SHARES
        }
    return factories


def is_repetition(
    candidate: str, surface: CostSurface, options: EngineOptions, best_arm_run: RunResult
) -> bool:
    """Whether a policy of `clairvoyant_factories` would run the steps of `best_arm_run` again.

    best_arm_run: of the policy that is made by BEST_ARM.  In each of its steps the same arm has the
    highest value

    -   with the drafters awake, if the run has no step at gamma = 0, which alone costs more then;
    -   with one drafter, if no other one drafts in the run;
    -   with patience, if the run has no switch, because no arm saves anything.
    """
    arms = [surface.arms[arm] for arm in set(best_arm_run.trace.arms)]
    if candidate == _AWAKE:
        return all(arm.gamma > 0 for arm in arms)
    if candidate.startswith(_ONLY):
        return {arm.drafter for arm in arms if arm.gamma > 0} <= {candidate.removeprefix(_ONLY)}
    # Where a switch is free, a patient policy leaves an arm for another one of the same value.
    is_patient = candidate.startswith(_PATIENCE)
    return is_patient and best_arm_run.switches == 0 and options.switch_seconds > 0


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
