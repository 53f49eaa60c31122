"""Defines what a simulation reports; the JSON output is these values, field by field."""

from dataclasses import dataclass, field
from enum import Enum

from simulator.latency import Spread


class PolicyOrigin(Enum):
    """Names where a policy's code comes from."""

    OURS = "ours"  # the production core
    IMPORTED = "imported"  # the peer's own class from its installed package, unmodified
    RESTATED = "restated"  # written from the peer's published description
    STATIC = "static"  # one arm, always
    HINDSIGHT = "hindsight"  # chosen knowing everything


@dataclass(frozen=True, slots=True)
class Latency:
    """Holds how long requests of an open loop waited, seconds.

    per_token: from arrival to the last token, over the output tokens.  tpot: from the first token
    to the last, over the output tokens but one.  end_to_end: from arrival to the last token.
    """

    per_token: Spread
    tpot: Spread
    end_to_end: Spread


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Reports one policy in one scenario, over all seeds.

    score: what ratios compare, more is better: tokens per second in a closed loop, in an open one
    the inverse of the mean latency per token in seconds.  tokens_per_second: output tokens over the
    seconds in which requests were in flight, pooled over seeds; in an open loop the load decides
    on it.  Ratios are geometric means over paired seeds, `_ci` their 95 % intervals (None with one
    seed).  ratio_to_*: > 1 means better than that one.  recovery_steps: median steps after a shift
    until the policy's own choices reach 95 % of what the best arm gives; None: no shift or never.
    probe_share: seconds lost to probing over all seconds, as the policy counts them.
    probe_step_share: steps that were probes over all steps.  tpot_ms: mean milliseconds between a
    sequence's tokens while it decodes.  decision_microseconds: mean wall time a step of choose +
    observe.  latency: of an open loop, the mean over seeds.
    """

    name: str
    origin: PolicyOrigin
    score: float
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
    probe_step_share: float
    tpot_ms: float
    decision_microseconds: float
    latency: Latency | None = None
    ratio_to_peers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SustainedLoad:
    """Reports the highest offered load at which a policy keeps a latency bound.

    requests_per_second, tokens_per_second: as they arrive, on average.
    """

    name: str
    requests_per_second: float
    tokens_per_second: float


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
    """Reports one scenario.

    shifting: its load or its traffic moves while it runs.  open_loop: requests come when they come,
    so policies are compared by latency.  sustained: by policy, if it was asked for.
    """

    name: str
    group: str
    description: str
    shifting: bool
    steps: int
    seeds: int
    best_static: str
    policies: tuple[PolicyReport, ...]
    timeline: Timeline | None = None
    open_loop: bool = False
    sustained: tuple[SustainedLoad, ...] = ()

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
