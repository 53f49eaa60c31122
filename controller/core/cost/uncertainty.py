"""Describes how uncertain the costs were at one moment, and which arms had run.

The cost model's features are causes of cost that arms share, each with its own uncertainty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.table import CostOrder
from controller.core.engine_spec import Arm

# Standard deviations of the log-coefficients before any live step: the machine, its growth with
# log B; per drafter: drafting at all, passes, width times log B.  Then that of a single cell's
# correction.
_DOUBT = {
    "profile": ((1.0, 0.3, 0.25, 0.15, 0.15), 0.03),
    "roofline": ((1.0, 0.3, 0.25, 0.25, 0.2), 0.08),
    "generic": ((3.0, 0.6, 0.3, 0.5, 0.4), 0.1),
}
# Process noise: standard deviations of the coefficients' change in one step.
_PROCESS_NOISE = (0.005, 0.001, 0.0003, 0.0003, 0.0003)
# Without a profile, the steps of a draft length before a longer one is tried.
_STEPS_RUNG = 8
# Steps of other cells after which a cell's own evidence has lost two thirds of its weight.
IDLE_STEPS = 2000.0
# Steps in a bucket after which gamma = 0 must have run in the bucket itself and not only at a
# similar batch size, unless the current arm's gain over it is at least this ratio.
_STEPS_SETTLED = 48
_CLEAR = 1.5
# Steps after which a cell's cost is stale and may be measured again.
STALE_STEPS = 900
# Error of the estimates (log seconds) above which gamma = 0 must be measured again.
DISAGREEMENT_MAX = 0.05
_NEAR_OCTAVES = 1.0
_Number = TypeVar("_Number", float, NDArray[np.float64])


def features(arms: Sequence[Arm], buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the features, [2 + 3 * drafters, arms, buckets].

    They are 1 and log B, and for each drafter: whether it drafts, passes, and width * log B.
    """
    drafters = list(dict.fromkeys(arm.drafter for arm in arms))
    log_batch = np.log2(buckets) / max(1.0, math.log2(buckets[-1]))
    found = np.zeros((2 + 3 * len(drafters), len(arms), len(buckets)))
    found[0] = 1.0
    found[1] = log_batch
    for d, drafter in enumerate(drafters):
        deepest = max(1, *(arm.gamma for arm in arms if arm.drafter == drafter), 1)
        for i, arm in enumerate(arms):
            if arm.drafter == drafter and arm.gamma > 0:
                found[2 + 3 * d, i] = 1.0
                found[3 + 3 * d, i] = arm.gamma / deepest
                width = math.log2(arm.gamma + 1) / math.log2(deepest + 1)
                found[4 + 3 * d, i] = width * log_batch
    return found


def doubt_before(source: str, coefficients: int) -> tuple[NDArray[np.float64], float]:
    """Returns the standard deviations before any live step: [coefficients], and a single cell's.

    source: "profile", or the prior's name.
    """
    shared, cell = _DOUBT[source]
    return _by_coefficient(shared, coefficients), cell


def process_noise(coefficients: int) -> NDArray[np.float64]:
    """Returns [coefficients, coefficients], the variance that a step adds."""
    return np.diag(np.square(_by_coefficient(_PROCESS_NOISE, coefficients)))


def _by_coefficient(values: Sequence[float], coefficients: int) -> NDArray[np.float64]:
    drafters = (coefficients - 2) // 3
    return np.array([*values[:2], *([*values[2:]] * drafters)])


def drafting_alike(arms: Sequence[Arm]) -> list[list[int]]:
    """Returns for each arm the drafting arms of the same drafter; an empty list for gamma = 0."""
    return [
        [k for k, other in enumerate(arms) if other.gamma and other.drafter == arm.drafter]
        if arm.gamma
        else []
        for arm in arms
    ]


@dataclass(frozen=True, slots=True)
class CostUncertainty:
    """Holds how uncertain the costs were at one moment.

    features: [coefficients, arms, buckets].  covariance: [coefficients, coefficients].  evidence:
    [arms, buckets], steps of each cell when it was updated last; seen: the step of that update, 0:
    never; now: the present step.  cell: prior variance of a single cell's correction; noise:
    variance of one step.  disagreed: [buckets] error of the estimates (log seconds) found since
    gamma = 0 ran.  off: [arms], those with gamma = 0.  near: [buckets, buckets], which are at
    similar batch sizes.  guessed: there is no profile.  drift: [arms, buckets], factors by which
    live steps changed the table.
    """

    features: NDArray[np.float64]
    covariance: NDArray[np.float64]
    evidence: NDArray[np.float64]
    seen: NDArray[np.int64]
    now: int
    cell: float
    noise: float
    disagreed: NDArray[np.float64]
    off: NDArray[np.bool_]
    near: NDArray[np.bool_]
    order: CostOrder
    guessed: bool
    drift: NDArray[np.float64]

    @property
    def ran(self) -> NDArray[np.bool_]:
        """Returns [arms, buckets], which cells have run."""
        return self.seen > 0

    def arms_that_ran(self) -> NDArray[np.bool_]:
        """Returns [arms], which have run in any bucket."""
        found: NDArray[np.bool_] = np.any(self.ran, axis=1)
        return found

    def relative(self, bucket: int, current: int) -> NDArray[np.float64]:
        """Returns [arms], the variance of log(C_arm / C_current) at a bucket."""
        return self.relatives(np.array([bucket]), np.array([current]))[:, 0]

    def relatives(
        self, buckets: NDArray[np.int64], current: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns [arms, rows], the variance of log(C_arm / C_current).

        buckets, current: [rows], the bucket and the arm (by index) of each.
        """
        rows = np.arange(len(buckets))
        phi = self.features[:, :, buckets]
        apart = phi - phi[:, None, current, rows]
        # `tensordot` is this product, and takes three times as long for tables of this size.
        moved = np.dot(self.covariance, apart.reshape(len(apart), -1)).reshape(apart.shape)
        shared = np.einsum("pab,pab->ab", apart, moved)
        cells = cell_variance(self.cell, self.noise, self._steps(buckets))
        doubt: NDArray[np.float64] = np.maximum(shared, 0.0) + cells + cells[current, rows]
        doubt[current, rows] = 0.0
        return doubt

    def off_is_due(self, bucket: int, gain: float) -> bool:
        """Returns whether gamma = 0 must run in a bucket, as a check on the estimates.

        It must run if the estimates disagree, and if it never ran in the bucket.  In a bucket with
        few steps or with a large gain, a run at a similar batch size is enough.

        gain: estimated value of the current arm over that of gamma = 0, as a ratio.
        """
        if self.disagreed[bucket] > DISAGREEMENT_MAX:
            return True
        if self.seen[self.off, bucket].any():
            return False
        settled = gain < _CLEAR and self.evidence[:, bucket].sum() >= _STEPS_SETTLED
        return settled or not bool(self.seen[self.off][:, self.near[bucket]].any())

    def stale(self, bucket: int) -> NDArray[np.bool_]:
        """Marks [arms] whose cost was last measured at least `STALE_STEPS` ago.

        The last step at a similar batch size counts; if there is none, the last step at any batch
        size; for an arm that never ran, the last step of any arm that drafts.
        """
        nearby = self.seen[:, self.near[bucket]].max(axis=1)
        last = np.where(nearby > 0, nearby, self.seen.max(axis=1))
        drafting = self.seen[~self.off].max(initial=0)
        last = np.where(last > 0, last, drafting)
        found: NDArray[np.bool_] = self.now - last >= STALE_STEPS
        return found

    def within_reach(self, bucket: int) -> NDArray[np.bool_]:
        """Marks [arms] of each drafter up to the longest that has run at a bucket, and one more.

        The next longer one is marked only if the longest has run for at least `_STEPS_RUNG` steps.
        """
        sure = self._steps(np.array([bucket]))[:, 0] >= _STEPS_RUNG
        return self.order.next_to(self.seen[:, bucket] > 0, sure)

    def _steps(self, buckets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [arms, rows] of these buckets, the evidence faded by the steps since then."""
        idle = self.now - self.seen[:, buckets]
        found: NDArray[np.float64] = self.evidence[:, buckets] * np.exp(idle / -IDLE_STEPS)
        return found


def near(sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns [buckets, buckets], whether two batch sizes are within `_NEAR_OCTAVES`."""
    octaves = np.log2(sizes)
    found: NDArray[np.bool_] = np.abs(octaves[:, None] - octaves[None, :]) <= _NEAR_OCTAVES
    return found


def cell_variance(prior: float, noise: float, steps: _Number) -> _Number:
    """Returns the variance of a single cell's correction after this many steps in it.

    prior: the variance before any step.  noise: the variance of one step.
    """
    doubt: _Number = prior / (1 + steps * (prior / noise))
    return doubt
