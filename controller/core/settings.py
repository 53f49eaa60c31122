"""Defines the settings of the decision core, each with its unit and its effect."""

import math
from dataclasses import dataclass, fields

POLICIES = ("goodput", "tide", "sglang-ema")

_POSITIVE = (
    "lease_seconds", "replan_seconds", "replan_steps", "payback_seconds", "probe_exposures",
    "probe_steps_max", "confidence_z", "prior_exposures", "class_exposures", "fast_exposures",
    "fast_steps", "slow_exposures", "slow_steps", "idle_steps", "shift_z", "shift_alarm",
)  # fmt: skip
_NOT_NEGATIVE = ("probe_credit_start_seconds", "probe_credit_max_seconds", "tpot_ceiling_seconds")


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Holds defaults that need no tuning; read docs/decisions.md before changing one.

    Raises ValueError for values out of range.
    """

    # Which rule decides: expected throughput ("goodput"), TIDE's threshold or SGLang's average.
    policy: str = "goodput"
    # The draft length that TIDE's threshold switches on and off.
    tide_gamma: int = 3
    # How long the shim may use a plan without fresh contact, seconds.
    lease_seconds: float = 5.0
    # The plan is evaluated again after this many seconds, or, on a fast engine, after this many
    # steps.  This bounds the work per engine.
    replan_seconds: float = 0.07
    replan_steps: float = 16.0
    # Relative gain that another arm must have before the plan switches to it.
    switch_margin: float = 0.01
    # Seconds within which a switch must pay back the drafter's catch-up.
    payback_seconds: float = 2.0
    # Longest mean time between a sequence's tokens, seconds; 0 = no ceiling.
    tpot_ceiling_seconds: float = 0.0
    # Share of step time that probing may cost.
    probe_share: float = 0.009
    # Initial probing credit and its maximum, in seconds of lost time.
    probe_credit_start_seconds: float = 0.05
    probe_credit_max_seconds: float = 0.5
    # Exposures that a probe should collect at its first position.
    probe_exposures: int = 16
    # Maximum steps of one probe.
    probe_steps_max: int = 8
    # Width of the confidence bounds, in standard errors (for `explain`).
    confidence_z: float = 1.28
    # Conditional acceptance assumed before any evidence, and its weight in exposures.
    prior_acceptance: float = 0.7
    prior_exposures: float = 4.0
    # Weight of the all-traffic estimate in a request class's estimate, in exposures.
    class_exposures: float = 24.0
    # Memory of the fast and the slow window, in exposures, and its minimum in steps.
    fast_exposures: float = 20.0
    fast_steps: float = 2.5
    slow_exposures: float = 1500.0
    slow_steps: float = 150.0
    # Steps after which an unobserved position has lost two thirds of its evidence.
    idle_steps: float = 2000.0
    # Standard errors between the windows that count as a shift of traffic.
    shift_z: float = 3.2
    # Log-likelihood ratio, over all positions together, that counts as a shift.
    shift_alarm: float = 6.0
    # Largest factor by which live steps may move a profiled cost, and a prior's.
    cost_drift_max_profiled: float = 2.0
    cost_drift_max_prior: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} must be a finite number, not {value!r}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for name in ("switch_margin", "probe_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)!r}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be below 0, but is {getattr(self, name)!r}")
        for name in ("cost_drift_max_profiled", "cost_drift_max_prior"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is a factor of at least 1, not {getattr(self, name)!r}")
        self._check_choices()

    def _check_choices(self) -> None:
        if not 0 < self.prior_acceptance < 1:
            raise ValueError(f"prior_acceptance must be in (0, 1), not {self.prior_acceptance!r}")
        if self.fast_exposures > self.slow_exposures or self.fast_steps > self.slow_steps:
            raise ValueError("the fast window must not be longer than the slow one")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.tide_gamma < 1:
            raise ValueError(f"tide_gamma must be 1 or more, not {self.tide_gamma!r}")
