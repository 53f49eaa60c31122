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

from controller.core.acceptance.traffic_state import octave_of
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import StepReport

# Maximum plain steps between two compared steps.
_APART_STEPS = 500
# Maximum relative difference of context between two compared steps.
_CONTEXT_APART = 0.1
# Steps over which a length's mean is taken, the minimum number for a comparison, and the steps
# after a change that are compared with it.
_MEAN_STEPS = 64
_MEAN_LEAST = 4
_COMPARED_STEPS = 64
# The number of latest batch sizes whose means are kept, and of arms for each: a step is compared
# with all of them.
_SIZES_KEPT = 64
_ARMS_KEPT = 16
# The number of latest differences that are kept: of 17 octaves, all pairs of 16 draft lengths.
_DIFFERENCES_KEPT = 2048
# Bound on one comparison in log seconds: an outlier is not caused by the draft length.
_DIFFERENCE_MAX = 0.25
# Weight factor of a comparison: several use the same mean, and changes back and forth use the same
# steps twice.
_COMPARISON_WEIGHT = 0.5
# Minimum weight (independent pairs of steps) and visits of an arm for a verdict, and the maximum
# weight, so that a verdict can change.
_WEIGHT_LEAST = 10.0
_VISITS_LEAST = 10
_WEIGHT_MOST = 500.0
# Two lengths cost the same if, at three standard errors, their difference in log seconds is below
# this per token, and below that in total.  One pass of the smallest drafter (a layer and the output
# head, with a target of 80 layers) takes more than 1 % of a step.
_SAME_PER_TOKEN = 0.005
_SAME_MOST = 0.02
_STANDARD_ERRORS = 3.0
# Lengths closer than this may take equally long: a drafter that keeps in step with the target runs
# one pass even at gamma = 0.
_LENGTHS_APART = 2

_SERIAL = frozenset({DrafterKind.MTP, DrafterKind.STANDALONE})
# A lookup costs almost nothing, and a mixture depends on its parts.
_COSTLY = _SERIAL | {DrafterKind.DFLASH}


@dataclass(slots=True)
class _Recent:
    """Holds means over the latest steps of one arm at one batch size.  at: the last step.

    log_seconds: mean over `steps` steps.  compared: steps compared with this mean in `visit`.
    """

    at: int
    context: float
    log_seconds: float
    steps: int = 1
    visit: int = -1
    compared: int = 0

    def weigh(self, visit: int) -> float:
        """Returns the additional weight of one more comparison in a visit.

        n steps compared with a mean of m steps are worth n m / (n + m) pairs.
        """
        if visit != self.visit:
            self.visit, self.compared = visit, 0
        self.compared += 1
        n, m = self.compared, self.steps
        return _COMPARISON_WEIGHT * m * (n / (n + m) - (n - 1) / (n - 1 + m))


@dataclass(slots=True)
class _Difference:
    """Holds the weighted mean of log seconds, long minus short length, over visits of an arm.

    Errors of one visit's steps are correlated if a machine is slow for a while, so a visit is one
    observation.  squares: sum of w^2 d^2, for a visit's weight w and its deviation d from the mean.
    The open visit is not included.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    visits: int = 0
    _visit: int = -1
    _visit_weight: float = 0.0
    _visit_mean: float = 0.0

    def add(self, value: float, weight: float, visit: int) -> None:
        """Adds a value of a visit; consecutive values of one visit count as their mean."""
        if visit != self._visit:
            if self._visit_weight:
                self._close()
            self._visit, self._visit_weight, self._visit_mean = visit, 0.0, 0.0
        self._visit_weight += weight
        self._visit_mean += (value - self._visit_mean) * weight / self._visit_weight

    def _close(self) -> None:
        weight, apart = self._visit_weight, self._visit_mean - self.mean
        self.visits += 1
        self.weight += weight
        self.mean += apart * weight / self.weight
        self.squares += weight**2 * apart * (self._visit_mean - self.mean)
        if self.weight > _WEIGHT_MOST:
            self.squares *= (_WEIGHT_MOST / self.weight) ** 2
            self.weight = _WEIGHT_MOST

    @property
    def error(self) -> float:
        """Returns the standard error of the mean.

        Changes back and forth count the same steps twice; the comparison weight corrects for this.
        """
        return math.sqrt(max(self.squares, 0.0) / _COMPARISON_WEIGHT) / self.weight


@dataclass(frozen=True, slots=True)
class FlatStepTime:
    """Reports that a drafter's `long` draft costs no more than its `short` one.

    difference: of the step times, relative to the shorter length's; error: its standard error.
    pairs: number of independent pairs of steps.  batch_size: the largest one of their octave.
    """

    drafter: str
    short: int
    long: int
    difference: float
    error: float
    pairs: int
    batch_size: int


class StepTimeCheck:
    """Compares the step times of one engine's draft lengths."""

    def __init__(self, drafters: tuple[DrafterSpec, ...]) -> None:
        self._kinds = {d.name: d.kind for d in drafters if d.kind in _COSTLY}
        # By batch size and arm.
        self._recent: OrderedDict[int, dict[Arm, _Recent]] = OrderedDict()
        # In order of the last addition.
        self._differences: OrderedDict[tuple[str, int, int, int], _Difference] = OrderedDict()
        self._steps = self._visit = 0
        self._last: Arm | None = None

    def observe(self, report: StepReport, seconds: float) -> None:
        """Adds a plain step.  seconds: without the cost of a change of arm."""
        if report.drafter not in self._kinds or report.groups:
            return
        self._steps += 1
        arm, size = report.arm, report.batch_size
        if arm != self._last:
            self._last = arm
            self._visit += 1
        context, log_seconds = report.kv_tokens / size, math.log(seconds)
        recent = self._at(size)
        if len(recent) > 1 or arm not in recent:
            self._compare(recent, arm, size, context, log_seconds)
        own = recent.get(arm)
        if own is None or not self._fits(own, context):
            recent[arm] = _Recent(self._steps, context, log_seconds)
            if len(recent) > _ARMS_KEPT:
                del recent[min(recent, key=lambda known: recent[known].at)]
            return
        own.at = self._steps
        own.steps = min(own.steps + 1, _MEAN_STEPS)
        own.log_seconds += (log_seconds - own.log_seconds) / own.steps
        own.context += (context - own.context) / own.steps

    def _at(self, size: int) -> dict[Arm, _Recent]:
        recent = self._recent.get(size)
        if recent is None:
            recent = self._recent[size] = {}
            if len(self._recent) > _SIZES_KEPT:
                self._recent.popitem(last=False)
        else:
            self._recent.move_to_end(size)
        return recent

    def _compare(
        self, recent: dict[Arm, _Recent], arm: Arm, size: int, context: float, log_seconds: float
    ) -> None:
        for other, mean in list(recent.items()):
            if other == arm or other.drafter != arm.drafter or mean.steps < _MEAN_LEAST:
                continue
            if not self._fits(mean, context):
                del recent[other]
            elif mean.visit != self._visit or mean.compared < _COMPARED_STEPS:
                apart = log_seconds - mean.log_seconds
                if other.gamma > arm.gamma:
                    apart = -apart
                self._add(arm, other.gamma, size, apart, mean.weigh(self._visit))

    def _fits(self, mean: _Recent, context: float) -> bool:
        """Returns whether a step with this context can be compared with, or added to, a mean."""
        apart = abs(mean.context - context)
        return self._steps - mean.at <= _APART_STEPS and apart <= _CONTEXT_APART * max(context, 1.0)

    def _add(self, arm: Arm, other: int, size: int, apart: float, weight: float) -> None:
        short, long = sorted((arm.gamma, other))
        if not self._can_tell(arm.drafter, short, long):
            return
        key = (arm.drafter, octave_of(size), short, long)
        difference = self._differences.setdefault(key, _Difference())
        self._differences.move_to_end(key)
        if len(self._differences) > _DIFFERENCES_KEPT:
            self._differences.popitem(last=False)
        bounded = min(_DIFFERENCE_MAX, max(-_DIFFERENCE_MAX, apart))
        difference.add(bounded, weight, self._visit)

    def _can_tell(self, drafter: str, short: int, long: int) -> bool:
        """Returns whether two draft lengths of a drafter must differ."""
        # A block drafter drafts the same block for every length but 0.
        is_block = self._kinds[drafter] is DrafterKind.DFLASH
        return long - short >= _LENGTHS_APART and not (short and is_block)

    def found(self) -> list[FlatStepTime]:
        """Returns for each drafter at most one pair with gamma = 0, then one without it."""
        found: dict[tuple[str, bool], FlatStepTime] = {}
        for flat in self._flat():
            kind = (flat.drafter, flat.short == 0)
            if kind not in found or _weight(flat) > _weight(found[kind]):
                found[kind] = flat
        return sorted(found.values(), key=lambda flat: (flat.drafter, flat.short))

    def _flat(self) -> Iterator[FlatStepTime]:
        for (drafter, octave, short, long), known in self._differences.items():
            if known.weight < _WEIGHT_LEAST or known.visits < _VISITS_LEAST:
                continue
            same = min(_SAME_MOST, _SAME_PER_TOKEN * (long - short))
            room = _STANDARD_ERRORS * known.error
            # A step without drafts must be faster; for two drafts either direction counts.
            apart = known.mean if short == 0 else abs(known.mean)
            if apart + room < same:
                yield FlatStepTime(
                    drafter, short, long, math.expm1(known.mean), known.error,
                    round(known.weight), 1 << octave,
                )  # fmt: skip


def _weight(flat: FlatStepTime) -> tuple[int, int]:
    """Returns a sort key: pairs with a larger difference of lengths are stronger evidence."""
    return flat.long - flat.short, flat.pairs
