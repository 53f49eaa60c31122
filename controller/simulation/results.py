"""Defines what a simulation reports; the JSON output is these values, field by field."""

from dataclasses import dataclass, field
from enum import Enum


class PolicyOrigin(Enum):
    """Names where a policy's code comes from."""

    OURS = "ours"  # the production core
    IMPORTED = "imported"  # the peer's own class from its installed package, unmodified
    RESTATED = "restated"  # written from the peer's published description
    STATIC = "static"  # one arm, always
    HINDSIGHT = "hindsight"  # chosen knowing everything


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Reports one policy in one scenario, over all seeds.

    tokens_per_second: output tokens over the seconds in which requests were in flight, pooled over
    seeds.  Ratios are geometric means over paired seeds, `_ci` their 95 % intervals (None with one
    seed).  ratio_to_*: > 1 means faster than that one.  recovery_steps: median steps after a shift
    until the policy's own choices reach 95 % of what the best arm gives; None: no shift or never.
    probe_share: seconds lost to probing over all seconds.  tpot_ms: mean milliseconds between a
    sequence's tokens.  decision_microseconds: mean wall time a step of choose + observe.
    """

    name: str
    origin: PolicyOrigin
    tokens_per_second: float
    ratio_to_oracle: float
    ratio_to_best_static: float
    ratio_to_off: float | None
    ratio_to_oracle_ci: tuple[float, float] | None
    ratio_to_best_static_ci: tuple[float, float] | None
    ratio_to_off_ci: tuple[float, float] | None
    switches_per_1000_steps: float
    recovery_steps: float | None
    probe_share: float
    tpot_ms: float
    decision_microseconds: float
    ratio_to_peers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A coarse picture of one seed for plots: rows of equal numbers of steps.

    seconds: [points], virtual time at the end of each.  batch_size, oracle_gamma, gamma: [points]
    means.  oracle_rate, rate: [points], tokens per second of the oracle and of ours.
    """

    seconds: tuple[float, ...]
    batch_size: tuple[float, ...]
    gamma: tuple[float, ...]
    rate: tuple[float, ...]
    oracle_seconds: tuple[float, ...]
    oracle_gamma: tuple[float, ...]
    oracle_rate: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """Reports one scenario.  shifting: its load or its traffic moves while it runs."""

    name: str
    group: str
    description: str
    shifting: bool
    steps: int
    seeds: int
    best_static: str
    policies: tuple[PolicyReport, ...]
    timeline: Timeline | None = None

    def policy(self, name: str) -> PolicyReport:
        """Returns the report of that name.  Raises KeyError."""
        return {report.name: report for report in self.policies}[name]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Holds everything that one `controller simulate` found."""

    command: str
    version: str
    seed: int
    wall_seconds: float
    scenarios: tuple[ScenarioReport, ...]
