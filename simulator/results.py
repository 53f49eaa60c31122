"""Defines the report of a simulation; the JSON output has the same fields."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from simulator.errors import InvalidInputError


def _empty_array() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(slots=True)
class RequestTimes:
    """Records every admitted request in the order of admission (Python lists, one entry each).

    arrival, first_token, finish: virtual seconds, NaN for events in the future.  In a closed loop a
    request arrives when it is admitted.  first_token: end of its first decode step.  The first
    token of a real engine comes from the prefill, one step earlier, for every policy alike.
    """

    arrival: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)

    def add(self, arrival: float, output_tokens: int) -> int:
        """Adds a request and returns its number."""
        self.arrival.append(arrival)
        self.first_token.append(np.nan)
        self.finish.append(np.nan)
        self.output_tokens.append(output_tokens)
        return len(self.arrival) - 1

    def finished_latencies(self) -> "Latencies":
        """Returns the waiting times of the requests that have finished."""
        finish, tokens = np.array(self.finish), np.array(self.output_tokens, dtype=np.float64)
        is_finished = np.isfinite(finish)
        arrival, first_token = (
            np.array(self.arrival)[is_finished],
            np.array(self.first_token)[is_finished],
        )
        finish, tokens = finish[is_finished], tokens[is_finished]
        end_to_end = finish - arrival
        has_several_tokens = tokens > 1
        tpot = (finish - first_token)[has_several_tokens] / (tokens[has_several_tokens] - 1)
        return Latencies(end_to_end / tokens, tpot, end_to_end)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Holds the waiting times of finished requests, seconds.

    per_token: [requests], from arrival to the last token, divided by the output tokens: the
    normalised latency of Orca and vLLM (arXiv 2309.06180), which has queueing and prefill in it.
    tpot: [requests of two tokens and more], (finish - first token) / (output tokens - 1).
    end_to_end: [requests], from arrival to the last token.
    """

    per_token: NDArray[np.float64] = field(default_factory=_empty_array)
    tpot: NDArray[np.float64] = field(default_factory=_empty_array)
    end_to_end: NDArray[np.float64] = field(default_factory=_empty_array)


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds mean, median and 99th percentile of a latency, seconds."""

    mean: float
    p50: float
    p99: float


def summarise_seconds(seconds: NDArray[np.float64]) -> Spread:
    """Summarises [requests] of seconds; all NaN without a request."""
    if len(seconds) == 0:
        return Spread(np.nan, np.nan, np.nan)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Spread(float(seconds.mean()), float(p50), float(p99))


class PolicyOrigin(Enum):
    """Names the origin of a policy's code."""

    OURS = "ours"  # the production core
    IMPORTED = "imported"  # the peer's own class from its installed package, unmodified
    RESTATED = "restated"  # written from the peer's published description
    STATIC = "static"  # one arm, always
    HINDSIGHT = "hindsight"  # chosen with full knowledge of the run


@dataclass(frozen=True, slots=True)
class Latency:
    """Holds how long requests of an open loop waited, seconds.

    per_token: from arrival to the last token, over the output tokens.  tpot: from the first
    token to the last, over the output tokens but one.  end_to_end: from arrival to the last token.
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

    shifting: its load or its traffic changes during the run.  open_loop: requests have arrival
    times, so policies are compared by latency.  sustained: by policy, if it was requested.
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
    """The results of one `controller simulate`."""

    command: str
    version: str
    seed: int
    wall_seconds: float
    scenarios: tuple[ScenarioReport, ...]


_ADAPTER: TypeAdapter[SimulationReport] = TypeAdapter(SimulationReport)


def to_json(report: SimulationReport) -> str:
    """Returns a report as JSON, with the field names of this module."""
    return _ADAPTER.dump_json(report, indent=1).decode() + "\n"


def to_values(report: SimulationReport) -> dict[str, Any]:
    """Returns the content of `to_json` as plain values."""
    values: dict[str, Any] = _ADAPTER.dump_python(report, mode="json")
    return values


def from_json(text: str) -> SimulationReport:
    """Reads a report from the JSON of `to_json`.  Raises InvalidInputError."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first_error = error.errors()[0]
        field_path = ".".join(str(part) for part in first_error["loc"])
        raise InvalidInputError(
            "report", 0, f"{field_path or 'text'}: {first_error['msg']}"
        ) from error
