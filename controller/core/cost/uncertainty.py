"""Describes how uncertain the costs were at one moment, and which arms had run."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.cost_order import CostOrder

# Without a profile, steps of a draft length before a longer one is tried.
_STEPS_RUNG = 8
# Error of the estimates (log seconds) above which gamma = 0 has to be measured again.
DISAGREEMENT_MAX = 0.05

_Number = TypeVar("_Number", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class CostUncertainty:
    """Holds how uncertain the costs were at one moment.

    features: [coefficients, arms, buckets].  covariance: [coefficients, coefficients].  steps:
    [arms, buckets], evidence in each cell, what it lost since included.  ran: [arms, buckets].
    cell: variance of what a single cell adds before any step; noise: variance of one step.
    disagreed: [buckets] error of the estimates (log seconds) that was found since gamma = 0 ran.
    off_ran: [buckets], whether gamma = 0 has ever run there, or, in a bucket with few steps, at a
    similar batch size.
    guessed: there is no profile.
    """

    features: NDArray[np.float64]
    covariance: NDArray[np.float64]
    steps: NDArray[np.float64]
    ran: NDArray[np.bool_]
    cell: float
    noise: float
    disagreed: NDArray[np.float64]
    off_ran: NDArray[np.bool_]
    order: CostOrder
    guessed: bool

    def relative(self, bucket: int, current: int) -> NDArray[np.float64]:
        """Returns [arms], the variance of log(C_arm / C_current) at a bucket."""
        return self._relative(slice(bucket, bucket + 1), current)[:, 0]

    def relatives(self, current: int) -> NDArray[np.float64]:
        """Returns [arms, buckets], the variance of log(C_arm / C_current)."""
        return self._relative(slice(None), current)

    def _relative(self, buckets: slice, current: int) -> NDArray[np.float64]:
        phi = self.features[:, :, buckets]
        apart = phi - phi[:, current : current + 1]
        # `tensordot` is this product, and takes three times as long for tables of this size.
        moved = np.dot(self.covariance, apart.reshape(len(apart), -1)).reshape(apart.shape)
        shared = np.einsum("pab,pab->ab", apart, moved)
        cells = cell_variance(self.cell, self.noise, self.steps[:, buckets])
        doubt: NDArray[np.float64] = np.maximum(shared, 0.0) + cells + cells[current]
        doubt[current] = 0.0
        return doubt

    def off_is_due(self, bucket: int) -> bool:
        """Returns whether gamma = 0 has to run there.

        It has to before it ever ran, whatever the estimates say, and when they disagree.
        """
        return bool(self.disagreed[bucket] > DISAGREEMENT_MAX or not self.off_ran[bucket])

    def within_reach(self, bucket: int) -> NDArray[np.bool_]:
        """Marks [arms] of each drafter up to the longest that has run at a bucket, and one more.

        The one more is marked only if the longest has run for some steps.
        """
        return self.order.next_to(self.ran[:, bucket], self.steps[:, bucket] >= _STEPS_RUNG)


def cell_variance(prior: float, noise: float, steps: _Number) -> _Number:
    """Returns the variance of what a single cell adds, after so many steps in it.

    prior: the variance before any step.  noise: the variance of one step.
    """
    doubt: _Number = prior / (1 + steps * (prior / noise))
    return doubt
