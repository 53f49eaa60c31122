"""Step times of one cell, and their robust statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm

# Steps further from the median than this number of (normal-consistent) deviations are outliers,
# unless they are within the floor, a share of the median.
_OUTLIER_DEVIATIONS = 6.0
_OUTLIER_FLOOR = 0.1
_MAD_TO_SIGMA = 1.4826
_Z95 = 1.96


class Context(Enum):
    """Purpose of a load: the grid, or one end of the context sweep."""

    GRID = "grid"
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class CellKey:
    """Identifies the arm and batch size of a step, and the purpose of its load."""

    drafter: str
    gamma: int
    batch_size: int
    context: Context = Context.GRID

    @property
    def arm(self) -> Arm:
        """Returns the arm that ran."""
        return Arm(self.drafter, self.gamma)


@dataclass(slots=True)
class Samples:
    """Steps of one cell: seconds[i] with kv_tokens[i] in the whole batch, in round rounds[i]."""

    seconds: list[float] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float, kv_tokens: int, round_number: int) -> None:
        """Adds a step."""
        self.seconds.append(seconds)
        self.kv_tokens.append(kv_tokens)
        self.rounds.append(round_number)


Cells = dict[CellKey, Samples]


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Median and interquartile range in seconds over `steps` steps.

    half_width: of the median's distribution-free 95 % confidence interval, relative to the median;
    infinite for fewer than 6 steps, for which it is undefined.
    """

    median: float
    spread: float
    steps: int
    half_width: float


def remove_outliers(seconds: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the steps that are not outliers, in ascending order."""
    values = np.sort(np.asarray(seconds, dtype=np.float64))
    median = float(np.median(values))
    deviation = _MAD_TO_SIGMA * float(np.median(np.abs(values - median)))
    limit = max(_OUTLIER_DEVIATIONS * deviation, _OUTLIER_FLOOR * median)
    inliers: NDArray[np.float64] = values[np.abs(values - median) <= limit]
    return inliers


def summarise(seconds: Sequence[float] | NDArray[np.float64]) -> StepSummary:
    """Summarises at least one step; outliers are left out first."""
    inliers = remove_outliers(seconds)
    n = len(inliers)
    median = float(np.median(inliers))
    low, high = np.quantile(inliers, (0.25, 0.75))
    # Order statistics around the median: their ranks are binomial, whatever the distribution.
    rank = math.floor((n - _Z95 * math.sqrt(n)) / 2)
    half = (
        (float(inliers[n - 1 - rank]) - float(inliers[rank])) / 2 / median
        if rank >= 0
        else math.inf
    )
    return StepSummary(median, float(high - low), n, half)
