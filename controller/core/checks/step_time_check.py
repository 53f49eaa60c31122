"""Tests whether the draft length affects an engine's step time.

Drafting with a model costs time in every engine, even where verification is free.  If a step at
gamma = 0 takes as long as one with a long draft, or a short draft as long as a long one, the engine
always drafts its full length and discards tokens.

Times of different draft lengths are compared at the same batch size, at nearly the same context and
close in time: the steps after a change with the mean of the other length's last steps.  So neither
a machine that slows down nor a growing context is mistaken for the effect of the draft length.
Batch sizes are aggregated by octave, because a large batch makes each verified token more costly.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from controller.core.acceptance.traffic_state import octave_of
from controller.core.engine_spec import DrafterSpec
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import StepReport

# Maximum plain steps between two compared steps.
_MAX_DISTANCE_STEPS = 500
# Maximum relative difference of context between two compared steps.
_MAX_CONTEXT_DIFFERENCE = 0.1
# Steps over which a length's mean is taken, the minimum number for a comparison, and the steps
# after a change that are compared with it.
_MEAN_STEPS = 64
_MEAN_MIN_STEPS = 4
_COMPARED_STEPS = 64
# The number of latest batch sizes whose means are kept, and of arms for each: a step is compared
# with all of them.
_MAX_BATCH_SIZES = 64
_MAX_ARMS_PER_SIZE = 16
# The number of latest differences that are kept: of 17 octaves, all pairs of 16 draft lengths.
_MAX_DIFFERENCES = 2048
# Bound on one comparison in log seconds: an outlier is not caused by the draft length.
_DIFFERENCE_MAX = 0.25
# Weight factor of a comparison: several use the same mean, and changes back and forth use the same
# steps twice.
_COMPARISON_WEIGHT = 0.5
# Minimum weight (independent pairs of steps) and visits of an arm for a verdict, and the maximum
# weight, so that a verdict can change.
_MIN_WEIGHT = 10.0
_MIN_VISITS = 10
_MAX_WEIGHT = 500.0
# Two lengths cost the same if, at three standard errors, their difference in log seconds is below
# this per token, and below that in total.  One pass of the smallest drafter (a layer and the output
# head, with a target of 80 layers) takes more than 1 % of a step.
_SAME_PER_TOKEN = 0.005
_SAME_MAX = 0.02
_STANDARD_ERRORS = 3.0
# Lengths closer than this may take equally long: a drafter that keeps in step with the target runs
# one pass even at gamma = 0.
_MIN_LENGTH_DIFFERENCE = 2

_SERIAL = frozenset({DrafterKind.MTP, DrafterKind.STANDALONE})
# A lookup costs almost nothing, and a mixture depends on its parts.
_TIMED_KINDS = _SERIAL | {DrafterKind.DFLASH}
# An arm's drafter and draft length.
_ArmKey: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _RecentMean:
    """Holds means over the latest steps of one arm at one batch size.  last_step: the last step.

    log_seconds: mean over `steps` steps.  compared_steps: steps compared with this mean in
    `compared_visit`.
    """

    last_step: int
    context_tokens: float
    log_seconds: float
    steps: int = 1
    compared_visit: int = -1
    compared_steps: int = 0

    def comparison_weight(self, visit: int) -> float:
        """Returns the additional weight of one more comparison in a visit.

        n steps compared with a mean of m steps are worth n m / (n + m) pairs.
        """
        if visit != self.compared_visit:
            self.compared_visit, self.compared_steps = visit, 0
        self.compared_steps += 1
        n, m = self.compared_steps, self.steps
        return _COMPARISON_WEIGHT * m * (n / (n + m) - (n - 1) / (n - 1 + m))


@dataclass(slots=True)
class _LogTimeDifference:
    """Holds the weighted mean of log seconds, long minus short length, over visits of an arm.

    Errors of one visit's steps are correlated if a machine is slow for a while, so a visit is one
    observation.  square_sum: sum of w^2 d^2, for a visit's weight w and its deviation d from the
    mean. The open visit is not included.
    """

    weight: float = 0.0
    mean: float = 0.0
    square_sum: float = 0.0
    visits: int = 0
    _visit: int = -1
    _visit_weight: float = 0.0
    _visit_mean: float = 0.0

    def add(self, value: float, weight: float, visit: int) -> None:
        """Adds a value of a visit; consecutive values of one visit count as their mean."""
        if visit != self._visit:
            if self._visit_weight:
                self._close_visit()
            self._visit, self._visit_weight, self._visit_mean = visit, 0.0, 0.0
        self._visit_weight += weight
        self._visit_mean += (value - self._visit_mean) * weight / self._visit_weight

    def _close_visit(self) -> None:
        weight, deviation = self._visit_weight, self._visit_mean - self.mean
        self.visits += 1
        self.weight += weight
        self.mean += deviation * weight / self.weight
        self.square_sum += weight**2 * deviation * (self._visit_mean - self.mean)
        if self.weight > _MAX_WEIGHT:
            self.square_sum *= (_MAX_WEIGHT / self.weight) ** 2
            self.weight = _MAX_WEIGHT

    @property
    def standard_error(self) -> float:
        """Returns the standard error of the mean.

        Changes back and forth count the same steps twice; the comparison weight corrects for this.
        """
        return math.sqrt(max(self.square_sum, 0.0) / _COMPARISON_WEIGHT) / self.weight


@dataclass(slots=True)
class _ComparedMean:
    """Names the mean that an arm's steps are compared with, and where the difference is added.

    is_longer: the arm's draft is longer than that of the mean.
    """

    mean: _RecentMean
    difference: _LogTimeDifference
    is_longer: bool


@dataclass(frozen=True, slots=True)
class FlatStepTime:
    """Reports that a drafter's `long_gamma` draft costs no more than its `short_gamma` one.

    relative_difference: of the step times, relative to the shorter length's; standard_error: of
    that difference.  step_pairs: number of independent pairs of steps.  batch_size: the largest one
    of their octave.
    """

    drafter: str
    short_gamma: int
    long_gamma: int
    relative_difference: float
    standard_error: float
    step_pairs: int
    batch_size: int


class StepTimeCheck:
    """Compares the step times of one engine's draft lengths."""

    def __init__(self, drafters: tuple[DrafterSpec, ...]) -> None:
        self._kinds = {d.name: d.kind for d in drafters if d.kind in _TIMED_KINDS}
        # By batch size, then by drafter and draft length.
        self._recent_means: OrderedDict[int, dict[_ArmKey, _RecentMean]] = OrderedDict()
        # Those of the present arm and batch size that its next steps are compared with.
        self._compared_means: list[_ComparedMean] = []
        # In order of the last addition.
        self._differences: OrderedDict[tuple[str, int, int, int], _LogTimeDifference] = (
            OrderedDict()
        )
        self._steps = self._visit = 0
        self._last_arm: _ArmKey | None = None
        self._last_batch_size = 0

    def observe(self, report: StepReport, seconds: float) -> None:
        """Adds a plain step.  seconds: without the cost of a change of arm."""
        if report.drafter not in self._kinds or report.groups:
            return
        self._steps += 1
        arm, batch_size = (report.drafter, report.gamma), report.batch_size
        if arm != self._last_arm:
            self._visit += 1
        if arm != self._last_arm or batch_size != self._last_batch_size:
            self._last_arm, self._last_batch_size = arm, batch_size
            recent_means = self._recent_means_for(batch_size)
            self._compared_means = [
                self._pair(arm, other_arm, mean, batch_size)
                for other_arm, mean in recent_means.items()
                if other_arm != arm and self._must_compare(arm, other_arm, mean)
            ]
        context, log_seconds = report.kv_tokens / batch_size, math.log(seconds)
        if self._compared_means:
            self._compare(context, log_seconds)
        recent_means = self._recent_means[batch_size]
        own_mean = recent_means.get(arm)
        if own_mean is None or not self._is_comparable(own_mean, context):
            recent_means[arm] = _RecentMean(self._steps, context, log_seconds)
            if len(recent_means) > _MAX_ARMS_PER_SIZE:
                del recent_means[
                    min(recent_means, key=lambda candidate: recent_means[candidate].last_step)
                ]
            return
        own_mean.last_step = self._steps
        if own_mean.steps < _MEAN_STEPS:
            own_mean.steps += 1
        own_mean.log_seconds += (log_seconds - own_mean.log_seconds) / own_mean.steps
        own_mean.context_tokens += (context - own_mean.context_tokens) / own_mean.steps

    def _recent_means_for(self, batch_size: int) -> dict[_ArmKey, _RecentMean]:
        recent_means = self._recent_means.get(batch_size)
        if recent_means is None:
            recent_means = self._recent_means[batch_size] = {}
            if len(self._recent_means) > _MAX_BATCH_SIZES:
                self._recent_means.popitem(last=False)
        else:
            self._recent_means.move_to_end(batch_size)
        return recent_means

    def _must_compare(self, arm: _ArmKey, other_arm: _ArmKey, mean: _RecentMean) -> bool:
        """Returns whether this visit of an arm may be compared with another arm's mean."""
        is_used_up = mean.compared_visit == self._visit and mean.compared_steps >= _COMPARED_STEPS
        return (
            other_arm[0] == arm[0]
            and mean.steps >= _MEAN_MIN_STEPS
            and not is_used_up
            and self._must_differ(arm[0], min(arm[1], other_arm[1]), max(arm[1], other_arm[1]))
        )

    def _pair(
        self, arm: _ArmKey, other_arm: _ArmKey, mean: _RecentMean, batch_size: int
    ) -> _ComparedMean:
        drafter, gamma = arm
        is_longer = gamma > other_arm[1]
        gammas = (other_arm[1], gamma) if is_longer else (gamma, other_arm[1])
        key = (drafter, octave_of(batch_size), *gammas)
        difference = self._differences.get(key)
        if difference is None:
            difference = self._differences[key] = _LogTimeDifference()
            if len(self._differences) > _MAX_DIFFERENCES:
                self._differences.popitem(last=False)
        self._differences.move_to_end(key)
        return _ComparedMean(mean, difference, is_longer)

    def _compare(self, context: float, log_seconds: float) -> None:
        """Compares a step with the selected means, and drops those that are used up or too old."""
        is_used_up = False
        for compared in self._compared_means:
            mean = compared.mean
            if not self._is_comparable(mean, context):
                is_used_up = True
                mean.compared_visit, mean.compared_steps = self._visit, _COMPARED_STEPS
                continue
            log_difference = log_seconds - mean.log_seconds
            if not compared.is_longer:
                log_difference = -log_difference
            bounded = min(_DIFFERENCE_MAX, max(-_DIFFERENCE_MAX, log_difference))
            compared.difference.add(bounded, mean.comparison_weight(self._visit), self._visit)
            is_used_up |= mean.compared_steps >= _COMPARED_STEPS
        if is_used_up:
            self._compared_means = [
                compared
                for compared in self._compared_means
                if compared.mean.compared_steps < _COMPARED_STEPS
            ]

    def _is_comparable(self, mean: _RecentMean, context: float) -> bool:
        """Returns whether a step with this context can be compared with, or added to, a mean."""
        context_difference = abs(mean.context_tokens - context)
        return (
            self._steps - mean.last_step <= _MAX_DISTANCE_STEPS
            and context_difference <= _MAX_CONTEXT_DIFFERENCE * max(context, 1.0)
        )

    def _must_differ(self, drafter: str, short_gamma: int, long_gamma: int) -> bool:
        """Returns whether two draft lengths of a drafter must differ."""
        # A block drafter drafts the same block for every length but 0.
        is_block = self._kinds[drafter] is DrafterKind.DFLASH
        return long_gamma - short_gamma >= _MIN_LENGTH_DIFFERENCE and not (short_gamma and is_block)

    def find_flat_pairs(self) -> list[FlatStepTime]:
        """Returns for each drafter at most one pair with gamma = 0, then one without it."""
        strongest: dict[tuple[str, bool], FlatStepTime] = {}
        for flat in self._iterate_flat_pairs():
            kind = (flat.drafter, flat.short_gamma == 0)
            if kind not in strongest or _finding_strength(flat) > _finding_strength(
                strongest[kind]
            ):
                strongest[kind] = flat
        return sorted(strongest.values(), key=lambda flat: (flat.drafter, flat.short_gamma))

    def _iterate_flat_pairs(self) -> Iterator[FlatStepTime]:
        for (drafter, octave, short_gamma, long_gamma), difference in self._differences.items():
            if difference.weight < _MIN_WEIGHT or difference.visits < _MIN_VISITS:
                continue
            max_same_difference = min(_SAME_MAX, _SAME_PER_TOKEN * (long_gamma - short_gamma))
            error_margin = _STANDARD_ERRORS * difference.standard_error
            # A step without drafts must be faster; for two drafts either direction counts.
            distance = difference.mean if short_gamma == 0 else abs(difference.mean)
            if distance + error_margin < max_same_difference:
                yield FlatStepTime(
                    drafter, short_gamma, long_gamma, math.expm1(difference.mean),
                    difference.standard_error,
                    round(difference.weight), 1 << octave,
                )  # fmt: skip


def _finding_strength(flat: FlatStepTime) -> tuple[int, int]:
    """Returns a sort key: pairs with a larger difference of lengths are stronger evidence."""
    return flat.long_gamma - flat.short_gamma, flat.step_pairs
