"""What a decision was made from, for people: see `explain` of the engine controller."""

from dataclasses import dataclass

from controller.core.overrides import Limits, Override
from controller.core.types import Arm, Plan


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """How a row would change.  stuck: nothing would be left there that the engine can run."""

    max_batch_size: int
    before: Arm
    after: Arm
    stuck: bool


@dataclass(frozen=True, slots=True)
class ArmValue:
    """One arm at one batch size, with the numbers it was judged by (units as in proto).

    cost_drift: factor by which live steps have moved its profiled cost.  catch_up_seconds: what
    changing to it now would cost first.  legal: overrides let it
    run, and the engine has prepared it.
    """

    arm: Arm
    expected_accepted: float
    step_seconds: float
    tokens_per_second: float
    optimistic_tokens_per_second: float
    chosen: bool
    extrapolated: bool
    cost_drift: float = 1.0
    catch_up_seconds: float = 0.0
    legal: bool = True


@dataclass(frozen=True, slots=True)
class PositionEstimate:
    """P(position k accepted | k-1 were) of one drafter, and the evidence behind it.

    label: the request class that it is of; "" = all traffic.
    """

    drafter: str
    position: int
    conditional_acceptance: float
    exposures: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole decision row at one batch size.

    limits: what overrides leave there.  overrides: all that are for this engine.  warm_start:
    whose acceptance estimates it began from, "" = nobody's.
    """

    engine_id: str
    batch_size: int
    plan: Plan
    arms: tuple[ArmValue, ...]
    positions: tuple[PositionEstimate, ...]
    profile_id: str
    margin: float
    probe_share: float
    kv_tokens_per_sequence: float
    runner_up: Arm
    policy: str
    probes: int
    probe_lost_seconds: float
    probe_credit_seconds: float
    shifts: int
    switches: int
    cost_outliers: int
    prior: str = ""
    limits: Limits | None = None
    overrides: tuple[Override, ...] = ()
    warm_start: str = ""
