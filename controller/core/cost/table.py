"""Holds what steps cost before any live step: [arms, buckets] of a profile or a prior."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.cost_order import CostOrder
from controller.core.cost.grid import profiled_grid
from controller.core.cost.prior import Prior, generic_prior
from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm

# Whatever the context, a step takes this share of what it takes at the table's context.
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds the seconds of a step, and which lie outside of the profile; both [arms, buckets]."""

    seconds: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]


class CostTable:
    """Prices `arms` at the batch sizes `buckets` (ascending); it never changes.

    padded, prior: as in `CostModel`.  profile_id: a digest of the profile, "" without one; prior:
    the source of the costs without a profile, else "".  grid: [arms, buckets] seconds at the
    context `kv_reference` (tokens a sequence), in order.  extrapolated: [arms, buckets], what lies
    outside of the profile.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        buckets: Sequence[int],
        profile: Profile | None,
        order: CostOrder,
        *,
        padded: bool,
        prior: Prior | None,
    ) -> None:
        # A digest of the whole file: made once, read at every plan.
        self.profile_id = profile.profile_id if profile else ""
        self.prior = ""
        self.sizes = np.asarray(buckets, dtype=np.float64)
        self._sizes = [float(b) for b in buckets]
        self._padded = padded
        self.extrapolated = np.zeros((len(arms), len(buckets)), dtype=bool)
        self.kv_reference = 0.0
        if profile is not None:
            grid, self.extrapolated = profiled_grid(arms, self.sizes, profile)
            self.kv_reference = profile.kv_tokens_per_sequence
            self._kv_rate = profile.seconds_per_kv_token
        else:
            prior = prior or generic_prior(arms, buckets)
            grid, self._kv_rate, self.prior = prior.grid, prior.kv_rate, prior.name
        self.grid = order.lowered(grid)
        self._least = _LEAST_SHARE * self.grid
        self._rows: list[list[float]] = self.grid.tolist()

    def bucket_of(self, batch_size: int) -> int:
        """Returns the index of the bucket that serves a batch size."""
        return min(bisect_left(self._sizes, batch_size), len(self._sizes) - 1)

    def seconds_of(self, arm: int, batch_size: int, kv_tokens: int) -> float:
        """Returns the seconds of a step of this arm (by index) at this batch and context."""
        row, sizes = self._rows[arm], self._sizes
        j = self.bucket_of(batch_size)
        grid, size = row[j], sizes[j]
        if not self._padded and j > 0 and batch_size < size:
            share = (batch_size - sizes[j - 1]) / (size - sizes[j - 1])
            grid = row[j - 1] + share * (grid - row[j - 1])
        context = self._kv_rate * (kv_tokens - batch_size * self.kv_reference)
        return max(grid + context, _LEAST_SHARE * grid)

    def seconds(self, kv_per_sequence: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [arms, buckets] seconds at this context (tokens a sequence), one or [buckets]."""
        context = self._kv_rate * (kv_per_sequence - self.kv_reference) * self.sizes
        return np.maximum(self.grid + context, self._least)
