"""Defines what is measured, for how long, and how well."""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.engine_spec import EngineSpec
from controller.profiling.errors import ProfilingUsageError

# Beyond this the default grid stops: larger batches cost time and rarely speculate.
DEFAULT_LARGEST_BATCH = 64


@dataclass(frozen=True, slots=True)
class ProfilingSettings:
    """Raises ProfilingUsageError for values that cannot work.

    batch_sizes: () for powers of two up to what the engine runs.  budget_seconds: the whole
    measurement.  tolerance: relative half width of a median's 95 % confidence interval that is
    good enough.  context_tokens: prompt length of the grid's loads.  new_tokens: how far a load's
    sequences grow before a fresh load takes over.
    """

    batch_sizes: tuple[int, ...] = ()
    budget_seconds: float = 60.0
    tolerance: float = 0.01
    context_tokens: int = 128
    new_tokens: int = 512
    # Part of the budget for the context sweep, and part that is kept for what takes longer.
    context_share: float = 0.15
    spare_share: float = 0.08
    # Times that every draft length is visited each time a batch size is, at the least.
    rounds: int = 2
    # Steps after a switch that are left out: the switch itself, and one that it may have disturbed.
    settle_steps: int = 2
    # Steps of a visit, at the least and when they come quickly: short visits make many rounds,
    # and a drift that is slow beside a round can be taken out.
    visit_steps: int = 3
    visit_steps_most: int = 10
    # Steps of a cell, at the least.
    cell_steps: int = 9
    # Nothing usable for so long means that something is wrong.
    stall_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.budget_seconds > 0:
            raise ProfilingUsageError(f"a budget of {self.budget_seconds} s leaves no time")
        if any(size < 1 for size in self.batch_sizes):
            raise ProfilingUsageError(f"batch sizes {list(self.batch_sizes)}: 1 is the least")
        if not 0 < self.tolerance < 1:
            raise ProfilingUsageError(f"tolerance {self.tolerance} must lie in (0, 1)")
        if self.context_tokens < 1 or self.new_tokens < 1:
            raise ProfilingUsageError("a load needs at least one token of context and one to make")


def batch_sizes_for(spec: EngineSpec, wanted: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes to measure, ascending.  Raises ProfilingUsageError."""
    most = spec.max_batch_size
    if wanted:
        if max(wanted) > most:
            raise ProfilingUsageError(
                f"batch size {max(wanted)}: this engine runs {most} sequences at most"
            )
        return tuple(sorted(set(wanted)))
    largest = min(most, DEFAULT_LARGEST_BATCH)
    powers = {1 << i for i in range(largest.bit_length()) if 1 << i <= largest}
    return tuple(sorted(powers | {largest}))
