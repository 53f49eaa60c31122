"""Which arm for which batch size: argmax of tokens per second, with hysteresis.

    V(d, gamma, B) = B * (1 + E_d[accepted | gamma]) / C(d, B, gamma, kv)

gamma = 0 is an arm like any other (E = 0).  The chosen arm changes only when another one's value
exceeds it by `switch_margin`, so that noise at a pivot does not turn into switching.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance import AcceptanceEstimator
from controller.core.cost import CostModel, Costs
from controller.core.settings import PlannerSettings
from controller.core.types import Arm, Reason

# Every batch size up to here has its own row; beyond, rows are about an eighth apart.
_EXACT_BUCKETS = 8


def batch_buckets(max_batch_size: int, graph_batch_sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Upper ends of the plan's batch buckets, ascending; the last one is `max_batch_size`.

    An engine with captured graphs pads a batch to the next captured size: then those sizes are the
    buckets.
    """
    if graph_batch_sizes:
        sizes = {b for b in graph_batch_sizes if b < max_batch_size}
    else:
        sizes = set(range(1, min(_EXACT_BUCKETS, max_batch_size) + 1))
        size = float(_EXACT_BUCKETS)
        while size < max_batch_size:
            size *= 1.19
            sizes.add(min(round(size), max_batch_size))
    return (*sorted(sizes - {max_batch_size}), max_batch_size)


@dataclass(frozen=True, slots=True)
class Values:
    """Everything the choice is made from.

    expected, optimistic_expected: [arms] draft tokens; costs: [arms, buckets] seconds;
    value, optimistic_value: [arms, buckets] tokens per second of the whole batch.
    """

    expected: NDArray[np.float64]
    costs: Costs
    value: NDArray[np.float64]
    optimistic_value: NDArray[np.float64]


class Planner:
    """The current choice per bucket.  `update` is the only thing that changes it."""

    def __init__(
        self, arms: Sequence[Arm], buckets: Sequence[int], settings: PlannerSettings
    ) -> None:
        self.arms = tuple(arms)
        self.buckets = tuple(buckets)
        self._settings = settings
        self._sizes = np.asarray(buckets, dtype=np.float64)
        self.choice: list[int] | None = None
        self.reasons: list[Reason] = [Reason.EXPLOIT] * len(buckets)
        self.switches = 0

    def evaluate(
        self,
        acceptance: Mapping[str, AcceptanceEstimator],
        costs: CostModel,
        kv_tokens_per_sequence: float,
    ) -> Values:
        """Values of all arms at all buckets on the estimates as they stand."""
        curves = {name: estimator.expected_accepted() for name, estimator in acceptance.items()}
        mean = np.array([curves[a.drafter][0][a.gamma] for a in self.arms])
        upper = np.array([curves[a.drafter][1][a.gamma] for a in self.arms])
        priced = costs.costs(kv_tokens_per_sequence, self._settings.confidence_z)
        return Values(
            mean,
            priced,
            self._sizes * (1 + mean)[:, None] / priced.seconds,
            self._sizes * (1 + upper)[:, None] / priced.optimistic_seconds,
        )

    def update(self, values: Values) -> Sequence[int]:
        """Moves the choice where the gain beats the margin; returns it, one arm index a bucket."""
        best = values.value.argmax(axis=0)
        if self.choice is None:
            self.choice = [int(i) for i in best]
            return self.choice
        for j, candidate in enumerate(best):
            current = self.choice[j]
            if candidate == current:
                self.reasons[j] = Reason.EXPLOIT
                continue
            gain = values.value[candidate, j] / values.value[current, j] - 1
            if gain > self._settings.switch_margin:
                self.choice[j] = int(candidate)
                self.reasons[j] = Reason.EXPLOIT
                self.switches += 1
            else:
                self.reasons[j] = Reason.HOLD
        return self.choice
