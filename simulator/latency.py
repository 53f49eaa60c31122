"""When requests came, spoke and ended, and how long their users waited for a token."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _no_request() -> NDArray[np.float64]:
    return np.empty(0)


@dataclass(slots=True)
class RequestTimes:
    """Records every admitted request in the order of admission (Python lists, one entry each).

    arrival, first_token, finish: virtual seconds; what has not come yet is NaN.  In a closed loop a
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

    def finished(self) -> "Latencies":
        """Returns the waiting times of the requests that have finished."""
        finish, tokens = np.array(self.finish), np.array(self.output_tokens, dtype=np.float64)
        done = np.isfinite(finish)
        arrival, first = np.array(self.arrival)[done], np.array(self.first_token)[done]
        finish, tokens = finish[done], tokens[done]
        end_to_end = finish - arrival
        several = tokens > 1
        tpot = (finish - first)[several] / (tokens[several] - 1)
        return Latencies(end_to_end / tokens, tpot, end_to_end)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Holds the waiting times of finished requests, seconds.

    per_token: [requests], from arrival to the last token, divided by the output tokens: the
    normalised latency of Orca and vLLM (arXiv 2309.06180), which has queueing and prefill in it.
    tpot: [requests of two tokens and more], (finish - first token) / (output tokens - 1).
    end_to_end: [requests], from arrival to the last token.
    """

    per_token: NDArray[np.float64] = field(default_factory=_no_request)
    tpot: NDArray[np.float64] = field(default_factory=_no_request)
    end_to_end: NDArray[np.float64] = field(default_factory=_no_request)


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds mean, median and 99th percentile of a latency, seconds."""

    mean: float
    p50: float
    p99: float


def spread(seconds: NDArray[np.float64]) -> Spread:
    """Summarises [requests] of seconds; all NaN without a request."""
    if len(seconds) == 0:
        return Spread(np.nan, np.nan, np.nan)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Spread(float(seconds.mean()), float(p50), float(p99))
