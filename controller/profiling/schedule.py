"""Defines what is measured, orders its parts, and divides the time among them.

A part is one batch size of the grid, or one batch size of the context sweep.  The grid is measured
twice, in ascending and then in descending order, with the sweep between, so that a temporary
slowdown does not make one batch size look expensive.  Time that a part does not need goes to the
parts after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from controller.core.engine_spec import Arm, EngineSpec
from controller.profiling.errors import ProfilingUsageError
from controller.profiling.load import LoadSource
from controller.profiling.samples import CellKey, Cells

# Candidate lengths of the long context; the longest that fits into the engine and the time is used.
LONG_CONTEXTS = (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256)
# Least ratio of the long context to the short one; below it there is no sweep.
_CONTEXT_RATIO_MIN = 2
_SWEEP_LARGEST_BATCH = 8
_SWEEP_BATCH_STEP = 4
# Share of its time that a part of the sweep may spend on the long prefill.
_PREFILL_SHARE = 0.4
# Largest batch of the default grid: larger ones cost time and rarely speculate.
DEFAULT_LARGEST_BATCH = 64


@dataclass(frozen=True, slots=True)
class ProfilingSettings:
    """Settings of a measurement.  Raises ProfilingUsageError for invalid values.

    batch_sizes: () for powers of two up to the engine's largest.  budget_seconds: for the whole
    measurement.  tolerance: relative half width of a median's 95 % confidence interval at which a
    cell is done.  context_tokens: prompt length of the grid's loads.  new_tokens: tokens that a
    load generates per sequence before a new load replaces it.
    """

    batch_sizes: tuple[int, ...] = ()
    budget_seconds: float = 60.0
    tolerance: float = 0.01
    context_tokens: int = 128
    new_tokens: int = 512
    # Share of the budget for the context sweep, and share that is reserved for delays.
    context_share: float = 0.15
    spare_share: float = 0.08
    # Least number of visits of every draft length per visit of a batch size.
    rounds: int = 2
    # Steps after a switch that are left out: the switch itself, and one that it may have disturbed.
    settle_steps: int = 2
    # Least and most steps of a visit.  Short visits make many rounds, so that a drift that is slow
    # compared with a round can be removed.
    visit_steps: int = 3
    visit_steps_most: int = 10
    # Least number of steps of a cell.
    cell_steps: int = 9
    # The measurement fails after this time without a usable step.
    stall_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.budget_seconds > 0:
            raise ProfilingUsageError(f"the budget of {self.budget_seconds} s must be above 0")
        if any(size < 1 for size in self.batch_sizes):
            raise ProfilingUsageError(f"batch sizes {list(self.batch_sizes)} must be at least 1")
        if not 0 < self.tolerance < 1:
            raise ProfilingUsageError(f"tolerance {self.tolerance} must be in (0, 1)")
        if self.context_tokens < 1 or self.new_tokens < 1:
            raise ProfilingUsageError("a load needs at least one prompt token and one new token")


class PartKind(Enum):
    """The quantity that a part measures."""

    GRID = "grid"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A part, with one batch size.  `is_second_pass`: in the second, descending pass."""

    kind: PartKind
    batch_size: int
    is_second_pass: bool = False

    @property
    def name(self) -> str:
        """Returns the part's name in the file of an interrupted measurement."""
        return f"{self.kind.value}:{self.batch_size}{':again' if self.is_second_pass else ''}"


def context_sweep_arms(spec: EngineSpec) -> tuple[Arm, ...]:
    """Returns the first drafter's smallest and middle gamma, since the context term is a scalar."""
    drafter = spec.drafters[0]
    middle = drafter.gammas[len(drafter.gammas) // 2]
    return tuple(dict.fromkeys((Arm(drafter.name, drafter.gammas[0]), Arm(drafter.name, middle))))


def batch_sizes_for(spec: EngineSpec, requested: Sequence[int]) -> tuple[int, ...]:
    """Returns the batch sizes to measure, ascending.  Raises ProfilingUsageError."""
    batch_size_max = spec.max_batch_size
    if requested:
        if max(requested) > batch_size_max:
            raise ProfilingUsageError(
                f"batch size {max(requested)}: this engine runs at most {batch_size_max} sequences"
            )
        return tuple(sorted(set(requested)))
    largest = min(batch_size_max, DEFAULT_LARGEST_BATCH)
    powers = {1 << i for i in range(largest.bit_length()) if 1 << i <= largest}
    return tuple(sorted(powers | {largest}))


def profile_parts(batch_sizes: Sequence[int]) -> tuple[ProfilePart, ...]:
    """Returns the grid, the context sweep at one or two of its batch sizes, and the grid again."""
    largest = max((b for b in batch_sizes if b <= _SWEEP_LARGEST_BATCH), default=min(batch_sizes))
    smaller = [b for b in batch_sizes if b * _SWEEP_BATCH_STEP <= largest]
    sweep = sorted({largest, *smaller[-1:]})
    return (
        *(ProfilePart(PartKind.GRID, size) for size in batch_sizes),
        *(ProfilePart(PartKind.CONTEXT, size) for size in sweep),
        *(ProfilePart(PartKind.GRID, size, is_second_pass=True) for size in reversed(batch_sizes)),
    )


def is_measured(part: ProfilePart, arms: Sequence[Arm], cells: Cells, least_steps: int) -> bool:
    """Whether the grid cell of every arm at the part's batch size has enough steps."""
    keys = [CellKey(arm.drafter, arm.gamma, part.batch_size) for arm in arms]
    return all(key in cells and len(cells[key]) >= least_steps for key in keys)


def long_context_tokens(
    batch_size: int,
    settings: ProfilingSettings,
    loads: LoadSource,
    prefill_seconds_per_token: float,
    seconds: float,
) -> int:
    """Returns the tokens of the sweep's long context; 0 if none fits the engine and the time."""
    for tokens in LONG_CONTEXTS:
        if tokens < _CONTEXT_RATIO_MIN * settings.context_tokens:
            break
        affordable = batch_size * tokens * prefill_seconds_per_token <= _PREFILL_SHARE * seconds
        if affordable and loads.new_tokens_for(batch_size, tokens):
            return tokens
    return 0


class TimeBudget:
    """Divides the time among the parts.  All times are of the same clock as `now`.

    `parts`: those that remain to be measured.
    """

    def __init__(
        self, settings: ProfilingSettings, parts: Sequence[ProfilePart], all_parts: int
    ) -> None:
        seconds = settings.budget_seconds * len(parts) / all_parts
        self.seconds = seconds
        self._remaining_parts = list(parts)
        # A part of the grid has weight 1; the parts of the sweep together get their share.
        grid = sum(part.kind is PartKind.GRID for part in parts)
        share = settings.context_share
        sweeps = max(len(parts) - grid, 1)
        self._sweep_weight = max(grid, 1) * share / (1 - share) / sweeps
        self._spendable = seconds * (1 - settings.spare_share)
        self._total_weight = sum(map(self._weight, parts)) or 1.0

    def start(self, now: float) -> None:
        """Starts the clock of the measurement."""
        self._begun_at = now
        self._deadline = now + self._spendable

    def part_seconds(self, part: ProfilePart, now: float) -> float:
        """Returns the seconds for the part that begins now, by its share of the remaining time."""
        remaining_seconds = max(self._deadline - now, 0.0)
        return (
            remaining_seconds * self._weight(part) / sum(map(self._weight, self._remaining_parts))
        )

    def finish_part(self, part: ProfilePart) -> None:
        """Removes a part that is done or left out."""
        self._remaining_parts.remove(part)

    def progress(self, part_share: float, now: float) -> tuple[float, float]:
        """Returns the share of the work that is done, and the remaining seconds.

        part_share: the share of the current part that is done.
        """
        remaining_weight = sum(map(self._weight, self._remaining_parts))
        if self._remaining_parts:
            remaining_weight -= min(part_share, 1.0) * self._weight(self._remaining_parts[0])
        done_share = 1 - remaining_weight / self._total_weight
        by_plan = self._deadline - now
        by_pace = (
            (now - self._begun_at) * (1 - done_share) / done_share if done_share > 0 else by_plan
        )
        return done_share, min(by_pace, by_plan) if by_plan > 0 else by_pace

    def _weight(self, part: ProfilePart) -> float:
        return 1.0 if part.kind is PartKind.GRID else self._sweep_weight
