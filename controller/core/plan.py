"""Defines what a plan is: a table by batch size, and the regime of drafter updates."""

from dataclasses import dataclass
from enum import Enum

from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded

MAX_PLAN_ROWS = 512  # the most that an engine's link accepts


@recorded("reason")
class Reason(Enum):
    """Reason for a plan or a row; `explain` gives the numbers."""

    EXPLOIT = "exploit"
    PROBE = "probe"
    HOLD = "hold"
    PROFILE_MISSING = "profile-missing"
    PROFILING = "profiling"
    LEASE = "lease"
    OVERRIDE = "override"


@recorded("regime_mode")
class RegimeMode(Enum):
    """Names the online-update regimes of the drafter."""

    OFF = "off"
    ONLINE = "online"
    COLLECT = "collect"


@recorded("regime")
@dataclass(frozen=True, slots=True)
class Regime:
    """Pairs a mode with its stride: rounds between gradient steps, 0 unless ONLINE."""

    mode: RegimeMode = RegimeMode.OFF
    stride: int = 0

    def __str__(self) -> str:
        return f"{self.mode.value}:{self.stride}" if self.stride else self.mode.value


@recorded("probe")
@dataclass(frozen=True, slots=True)
class Probe:
    """Tries another arm for `steps` steps, counted over all rows that name the probe.

    `probe_id` is never reused.
    """

    probe_id: int
    arm: Arm
    steps: int


@recorded("plan_row")
@dataclass(frozen=True, slots=True)
class PlanRow:
    """Holds the choice for batch sizes up to `max_batch_size` (and above the previous row's).

    drafter_asleep: the drafter does not run in steps at gamma = 0, the probe's steps included.
    """

    max_batch_size: int
    arm: Arm
    reason: Reason
    probe: Probe | None = None
    drafter_asleep: bool = False


@recorded("mixture_rule")
@dataclass(frozen=True, slots=True)
class MixtureRule:
    """Rule by which a mixture chooses each row's drafter; see proto `MixtureRule`.

    arm: the mixture and its draft length.  main_expected: expected accepted tokens of a proposal of
    the main drafter.  free_expected: the same for the free drafter, by match length from
    `least_match`; the last entry covers all longer matches.  ratio_weight: weight of a step in a
    request's running means.
    """

    arm: Arm
    main_expected: float
    free_expected: tuple[float, ...]
    least_match: int
    ratio_weight: float


@recorded("plan")
@dataclass(frozen=True, slots=True)
class Plan:
    """Maps batch sizes to choices.  `rows` ascend; the last one also serves every larger batch.

    overrides: ids of the overrides that affect any row.  draft_version: version of the drafter that
    must serve, 0 = as loaded.  rules: one for each mixture and draft length.
    """

    epoch: int
    rows: tuple[PlanRow, ...]
    regime: Regime
    lease_seconds: float
    reason: Reason
    reason_detail: str
    overrides: tuple[str, ...] = ()
    draft_version: int = 0
    rules: tuple[MixtureRule, ...] = ()

    def row_for(self, batch_size: int) -> PlanRow:
        """Returns the row that serves this batch size."""
        for row in self.rows:
            if batch_size <= row.max_batch_size:
                return row
        return self.rows[-1]
