"""Estimates the context of a sequence by batch size: who runs alone may have the longest one.

Each bucket of batch sizes has a moving average, and leans on the buckets near it:

    context_j = (n_j m_j + w l_j) / (n_j + w),    l_j = the mean of the others, weighted by nearness

with a small w, so that a bucket that was never seen has the context of its neighbours.  An average
that was not used for a while adapts quickly when its batch size returns, and loses weight slowly
until then.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.recorded_state import recorded

# Steps that an average remembers; after how many without one it adapts again, and fades.
_MEMORY_STEPS = 20.0
_ADAPTS_STEPS = 100.0
_FADES_STEPS = 2000.0
# Octaves between batch sizes over which nearness falls to a third.
_NEAR_OCTAVES = 0.5
# The steps that the buckets nearby count as.
_LEANING = 0.02
# The weight of the mean over all batch sizes.
_LEAST = 1e-3


@recorded("context_by_batch", "mean _means _steps _seen _weights")
class ContextByBatch:
    """Holds the averages.  buckets: ascending batch sizes.  start: tokens, before any step.

    mean: tokens of a sequence, over all batch sizes.
    """

    def __init__(self, buckets: Sequence[int], start: float) -> None:
        octaves = np.log2(np.asarray(buckets, dtype=np.float64))
        near = np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / _NEAR_OCTAVES)
        np.fill_diagonal(near, 0.0)
        self._near = near
        self.mean = start
        # Plain lists: each step reads and writes one entry.
        self._means = [start] * len(buckets)
        self._weights = [0.0] * len(buckets)
        self._seen = [0] * len(buckets)
        self._steps = 0

    def observe(self, bucket: int, kv_per_sequence: float) -> None:
        """Takes a step: the context of its sequences, in tokens."""
        self._steps += 1
        self.mean += (kv_per_sequence - self.mean) / min(_MEMORY_STEPS, float(self._steps))
        idle = self._steps - self._seen[bucket] - 1
        weight = self._weights[bucket] * math.exp(-idle / _ADAPTS_STEPS)
        weight = min(weight + 1, _MEMORY_STEPS)
        self._means[bucket] += (kv_per_sequence - self._means[bucket]) / weight
        self._weights[bucket] = weight
        self._seen[bucket] = self._steps

    def by_bucket(self) -> NDArray[np.float64]:
        """Returns [buckets], tokens of a sequence."""
        means = np.array(self._means)
        if self._steps == 0:
            return means
        idle = self._steps - np.array(self._seen)
        weights = np.array(self._weights) * np.exp(idle / -_FADES_STEPS)
        totals = weights * means
        # The mean of all counts where nothing near was seen.
        others = (self._near @ totals + _LEAST * self.mean) / (self._near @ weights + _LEAST)
        found: NDArray[np.float64] = (totals + _LEANING * others) / (weights + _LEANING)
        return found
