"""Fits a profile to step times: the context term by least squares, then each cell's median.

    seconds = c[d, gamma, B] + k_kv * (kv - B * kv_ref)

k_kv comes from the context sweep only.  There each (arm, B) was measured with a short and a long
context in turn.  Each has its own intercept, so only differences within it count; points are
weighted by the inverse square of their median's standard error.  The grid's steps are then
converted to the reference context, the mean context of the grid, and the machine's drift is
removed.

At one batch size every arm is visited in every round.  A machine that is slower in one round slows
all arms alike, so with m[a, r] the median of arm a in round r

    log m[a, r] = level[a] + drift[r] + noise

The drift is estimated by median polish (Tukey): alternately the median over arms after subtracting
the levels, and the median over rounds after subtracting the drifts.  Medians are used so that a
disturbance of one visit affects neither.  Dividing by exp(drift) keeps the ratios of the arms
within the rounds, at the machine's usual speed.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import ProfileCell
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.model_shapes import WEIGHTLESS
from controller.profiling.errors import MeasurementError
from controller.profiling.samples import (
    CellKey,
    Context,
    Samples,
    StepSummary,
    remove_outliers,
    summarise,
)

# Least relative error of a median: drift within a visit is not averaged out.
_ERROR_FLOOR = 0.003
_STEPS_MIN = 3
# Thresholds of a warning about a measurement.
_DOUBTFUL_SPREAD = 0.15
_DOUBTFUL_DISORDER = 0.1
# The longest draft must cost at least this share more than gamma = 0: even a small drafter's pass
# takes more than 1 % of a large target's, which is about the error of a median.  A single token may
# cost nothing: a drafter that stays awake runs one pass at gamma = 0 too.
_FLAT_GROWTH = 0.01
_LENGTHS_APART = 2
# Interquartile range of a normal distribution, in standard deviations; and the standard error of
# its median over that of its mean.
_IQR_TO_SIGMA = 1 / 1.349
_MEDIAN_PENALTY = 1.2533
# Iterations of the median polish.
_POLISH_ITERATIONS = 8

Key = TypeVar("Key")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ContextTerm:
    """Seconds that a token of context adds to a step, and the standard error of this estimate."""

    seconds_per_kv_token: float
    error: float
    measured: bool


@dataclass(frozen=True, slots=True)
class CostFit:
    """The result of a measurement; see Profile for the meaning and the units."""

    kv_tokens_per_sequence: float
    context: ContextTerm
    cells: tuple[ProfileCell, ...]


def fit_costs(cells: Mapping[CellKey, Samples]) -> CostFit:
    """Fits all cells.  Raises MeasurementError if the grid is empty."""
    grid = {k: s for k, s in cells.items() if k.context is Context.GRID and len(s) >= _STEPS_MIN}
    if not grid:
        raise MeasurementError("no cell of the grid was measured")
    context = fit_context(cells)
    per_sequence = [kv / key.batch_size for key, s in grid.items() for kv in s.kv_tokens]
    reference = float(np.mean(per_sequence))
    profile_cells = []
    for size in sorted({key.batch_size for key in grid}):
        column = {key: samples for key, samples in grid.items() if key.batch_size == size}
        for key, summary in summarise_column(column, reference, context.seconds_per_kv_token):
            profile_cells.append(
                ProfileCell(
                    key.drafter, key.gamma, size, summary.median, summary.spread, summary.steps
                )
            )
    profile_cells.sort(key=lambda cell: (cell.drafter, cell.gamma, cell.batch_size))
    return CostFit(reference, context, tuple(profile_cells))


def summarise_column(
    column: Mapping[CellKey, Samples], kv_reference: float, seconds_per_kv_token: float
) -> list[tuple[CellKey, StepSummary]]:
    """Summarises the cells of a batch size at the reference context, with the drift removed."""
    at_reference = {
        key: np.asarray(samples.seconds)
        - seconds_per_kv_token * (np.asarray(samples.kv_tokens) - key.batch_size * kv_reference)
        for key, samples in column.items()
    }
    steady = remove_drift(at_reference, {key: s.rounds for key, s in column.items()})
    return [(key, summarise(seconds)) for key, seconds in steady.items()]


def fit_context(cells: Mapping[CellKey, Samples]) -> ContextTerm:
    """Fits the context term; 0 and not measured if no cell has both a short and a long context."""
    groups: dict[tuple[Arm, int], list[tuple[float, float, float]]] = defaultdict(list)
    for key, samples in cells.items():
        if key.context is Context.GRID or len(samples) < _STEPS_MIN:
            continue
        summary = summarise(samples.seconds)
        error = _MEDIAN_PENALTY * _IQR_TO_SIGMA * summary.spread / math.sqrt(summary.steps)
        error = max(error, _ERROR_FLOOR * summary.median)
        point = (float(np.median(samples.kv_tokens)), summary.median, error**-2)
        groups[key.arm, key.batch_size].append(point)
    product = square = 0.0
    for points in groups.values():
        if len(points) < 2:
            continue
        kv, seconds, weight = np.array(points).T
        kv_off = kv - np.average(kv, weights=weight)
        seconds_off = seconds - np.average(seconds, weights=weight)
        product += float(np.sum(weight * kv_off * seconds_off))
        square += float(np.sum(weight * kv_off**2))
    if square == 0.0:
        return ContextTerm(0.0, 0.0, measured=False)
    return ContextTerm(max(product / square, 0.0), 1 / math.sqrt(square), measured=True)


def doubt_reason(cells: Sequence[ProfileCell]) -> str:
    """Explains why a measurement is doubtful; "" if it is not."""
    spread = float(np.median([cell.spread_seconds / cell.step_seconds for cell in cells]))
    if spread > _DOUBTFUL_SPREAD:
        return f"steps of one cell spread by {spread:.0%} (interquartile range)"
    if (share := largest_disorder(cells)) > _DOUBTFUL_DISORDER:
        return f"a smaller batch or draft length costs up to {share:.0%} more than a larger one"
    return ""


def flat_drafters(cells: Sequence[ProfileCell], drafters: Sequence[DrafterSpec]) -> Iterator[str]:
    """Yields a line for each drafter with weights whose longest draft costs as much as none.

    This must hold at every batch size: even where verification is free, drafting is not.
    """
    cost = {(cell.drafter, cell.gamma, cell.batch_size): cell.step_seconds for cell in cells}
    for drafter in drafters:
        longest = drafter.gammas[-1]
        if drafter.kind in WEIGHTLESS or longest < _LENGTHS_APART:
            continue
        growth = [
            cost[drafter.name, longest, size] / seconds - 1
            for (name, gamma, size), seconds in cost.items()
            if name == drafter.name and not gamma and (name, longest, size) in cost
        ]
        if growth and max(growth) < _FLAT_GROWTH:
            yield (
                f"a step of {drafter.name} takes no longer at gamma {longest} than at gamma 0, at "
                "any batch size: the engine may ignore the draft length and always draft in full "
                "(docs/engines.md lists its version, method and model runner)"
            )


def largest_disorder(cells: Sequence[ProfileCell]) -> float:
    """Measures how much the costs violate monotonicity in gamma and in B.

    Returns the largest share by which a cell costs more than one with a larger gamma or B; 0 if
    none does.  It is the first sign that other load disturbed the measurement.
    """
    cost = {(cell.drafter, cell.gamma, cell.batch_size): cell.step_seconds for cell in cells}
    gammas = {d: sorted({g for x, g, _ in cost if x == d}) for d, _, _ in cost}
    sizes = sorted({size for _, _, size in cost})
    worst = 0.0
    for (drafter, gamma, size), seconds in cost.items():
        for larger_cell in (
            *((drafter, g, size) for g in gammas[drafter] if g > gamma),
            *((drafter, gamma, s) for s in sizes if s > size),
        ):
            if larger_cell in cost:
                worst = max(worst, seconds / cost[larger_cell] - 1)
    return worst


def remove_drift(
    seconds: Mapping[Key, Floats], rounds: Mapping[Key, Sequence[int]]
) -> dict[Key, Floats]:
    """Returns the step times of one batch size with the machine's drift removed.

    seconds[arm][i] was measured in round rounds[arm][i].  Arms without steps are left out.
    """
    arms = [arm for arm in seconds if len(seconds[arm])]
    numbers = sorted({number for arm in arms for number in rounds[arm]})
    column = {number: r for r, number in enumerate(numbers)}
    columns = {arm: np.array([column[n] for n in rounds[arm]], dtype=np.intp) for arm in arms}
    medians = np.full((len(arms), len(numbers)), np.nan)
    for a, arm in enumerate(arms):
        for r in range(len(numbers)):
            values = seconds[arm][columns[arm] == r]
            if len(values):
                medians[a, r] = np.log(np.median(remove_outliers(values)))
    drift = _median_polish(medians) if arms else np.zeros(0)
    return {arm: seconds[arm] * np.exp(-drift[columns[arm]]) for arm in arms}


def _median_polish(medians: Floats) -> Floats:
    """Returns the drift of each round.  medians: [arms, rounds] logarithms, NaN if not visited."""
    drift = np.zeros(medians.shape[1])
    for _ in range(_POLISH_ITERATIONS):
        level = np.nanmedian(medians - drift, axis=1, keepdims=True)
        drift = np.nanmedian(medians - level, axis=0)
        drift -= np.median(drift)
    return drift
