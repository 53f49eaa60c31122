"""Tests whether the draft length makes a difference to an engine's step time.

Drafting with a model costs time in every engine, even where verification is free.  Where a step at
gamma = 0 takes no less than a long draft, or a short draft as long as a long one, the engine drafts
all the same and throws the tokens away.

Times of different draft lengths are compared at the same batch size and at nearly the same context,
and close to each other in time: the steps after a change with the mean of the other length's last
ones.  So neither a machine that slows down nor a growing context is taken for the draft length.
Batch sizes are summed up by octave, because a large batch pays for each verified token.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from controller.core.acceptance.traffic_state import octave_of
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import StepReport

# Plain steps between two that are compared, at most.
_APART_STEPS = 500
# Relative difference of context that two compared steps may have.
_CONTEXT_APART = 0.1
# Steps over which the mean of a length is taken, those that it takes at the least, and those after
# a change that are compared with it.
_MEAN_STEPS = 64
_MEAN_LEAST = 4
_COMPARED_STEPS = 64
# Batch sizes whose means are kept, the latest ones, and the arms of each: a step is compared with
# all of them.
_SIZES_KEPT = 64
_ARMS_KEPT = 16
# Differences that are kept, the latest ones: of 17 octaves, all pairs of 16 draft lengths.
_DIFFERENCES_KEPT = 2048
# What one comparison may count, in log seconds: an outlier is no difference of draft lengths.
_DIFFERENCE_MAX = 0.25
# A comparison's share of weight: others use the same mean, and forth and back the same steps count
# twice.
_COMPARISON_WEIGHT = 0.5
# Weight (independent pairs of steps) and visits of an arm before a verdict, and the most weight, so
# that a verdict can change.
_WEIGHT_LEAST = 10.0
_VISITS_LEAST = 10
_WEIGHT_MOST = 500.0
# Two lengths cost the same if, at three standard errors, they lie closer than this for each token
# (log seconds), and in all than that.  One pass of the smallest drafter (a layer and the output
# head, beside a target of 80 layers) takes more than 1 % of a step.
_SAME_PER_TOKEN = 0.005
_SAME_MOST = 0.02
_STANDARD_ERRORS = 3.0
# Between fewer passes there may be no difference: at gamma = 0 a drafter that keeps in step with
# the target runs one pass as well.
_LENGTHS_APART = 2

_SERIAL = frozenset({DrafterKind.MTP, DrafterKind.STANDALONE})
# A lookup costs nothing, and a mixture what its parts do.
_COSTLY = _SERIAL | {DrafterKind.DFLASH}


@dataclass(slots=True)
class _Recent:
    """Holds means over the latest steps of one arm at one batch size.  at: the last one.

    log_seconds: over `steps` of them.  compared: steps that were compared with it in `visit`.
    """

    at: int
    context: float
    log_seconds: float
    steps: int = 1
    visit: int = -1
    compared: int = 0

    def weigh(self, visit: int) -> float:
        """Returns what one more comparison adds to the weight of a visit's mean against this one.

        n steps against a mean of m are worth n m / (n + m) pairs.
        """
        if visit != self.visit:
            self.visit, self.compared = visit, 0
        self.compared += 1
        n, m = self.compared, self.steps
        return _COMPARISON_WEIGHT * m * (n / (n + m) - (n - 1) / (n - 1 + m))


@dataclass(slots=True)
class _Difference:
    """Holds the weighted mean of log seconds, long minus short length, over visits of an arm.

    Steps of one visit err together where a machine is slow for a while, so that a visit is one
    observation.  squares: sum of w^2 d^2, for a visit's weight w and its deviation d from the mean.
    The visit that is under way is kept apart.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    visits: int = 0
    _visit: int = -1
    _visit_weight: float = 0.0
    _visit_mean: float = 0.0

    def add(self, value: float, weight: float, visit: int) -> None:
        """Counts a value of a visit; those of one visit in a row count as their mean."""
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

        Forth and back count the same steps twice, which the weight of a comparison makes up for.
        """
        return math.sqrt(max(self.squares, 0.0) / _COMPARISON_WEIGHT) / self.weight


@dataclass(frozen=True, slots=True)
class FlatStepTime:
    """Tells that `long` tokens of a drafter cost no more than `short` ones.

    difference: of the step times, relative to the shorter length's; error: its standard error.
    pairs: independent pairs of steps behind it.  batch_size: the largest one of their octave.
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
        # The one that was added to last stands last.
        self._differences: OrderedDict[tuple[str, int, int, int], _Difference] = OrderedDict()
        self._steps = self._visit = 0
        self._last: Arm | None = None

    def observe(self, report: StepReport, seconds: float) -> None:
        """Takes a plain step.  seconds: without what a change of arm cost."""
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
        """Returns whether a step of this context can be compared with a mean, or belongs to it."""
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
        """Returns by drafter at most one pair of lengths with gamma = 0, then one without."""
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
            # Without drafts a step must be quicker; of two drafts, neither may differ.
            apart = known.mean if short == 0 else abs(known.mean)
            if apart + room < same:
                yield FlatStepTime(
                    drafter, short, long, math.expm1(known.mean), known.error,
                    round(known.weight), 1 << octave,
                )  # fmt: skip


def _weight(flat: FlatStepTime) -> tuple[int, int]:
    """Returns by what findings are ordered: the further two lengths differ, the more they say."""
    return flat.long - flat.short, flat.pairs
