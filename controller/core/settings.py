"""The constants of the decision core, each with its unit and what it trades."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Defaults that need no tuning; see the README before changing one.

    Raises ValueError for values that cannot work.
    """

    # How long the shim may use a plan without fresh contact, seconds.
    lease_seconds: float = 5.0
    # Smallest time between two evaluations of the plan, seconds: bounds the work per engine.
    replan_seconds: float = 0.02
    # Relative gain that another arm must promise before the plan switches to it.
    switch_margin: float = 0.02
    # Share of step time that probing may cost.
    probe_share: float = 0.01
    # Probing credit at the start, and the most that can be saved up, seconds of lost time.
    probe_credit_start_seconds: float = 0.2
    probe_credit_max_seconds: float = 1.0
    # Sequences that a probe wants to see at its first position.
    probe_exposures: int = 24
    # Most steps of one probe.
    probe_steps_max: int = 8
    # Width of the confidence bounds, in standard errors.
    confidence_z: float = 1.28
    # Conditional acceptance assumed before any evidence, and how many exposures it weighs.
    prior_acceptance: float = 0.7
    prior_exposures: float = 4.0
    # Memory of the fast and the slow window, in exposures (sequences seen at a position).
    fast_exposures: float = 20.0
    slow_exposures: float = 1500.0
    # Standard errors between the windows that count as a shift of traffic.
    shift_z: float = 2.8
    # Largest factor by which live steps may move a profiled cost, and a prior's.
    cost_drift_max_profiled: float = 1.5
    cost_drift_max_prior: float = 10.0

    def __post_init__(self) -> None:
        positive = (
            "lease_seconds", "replan_seconds", "probe_exposures", "probe_steps_max",
            "confidence_z", "prior_exposures", "fast_exposures", "slow_exposures", "shift_z",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for name in ("switch_margin", "probe_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {getattr(self, name)!r}")
        if not 0 < self.prior_acceptance < 1:
            raise ValueError(f"prior_acceptance must lie in (0, 1), not {self.prior_acceptance!r}")
        if self.fast_exposures > self.slow_exposures:
            raise ValueError("fast_exposures must not exceed slow_exposures")
        for name in ("cost_drift_max_profiled", "cost_drift_max_prior"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is a factor of at least 1, not {getattr(self, name)!r}")
