"""Acceptance that is correlated like recorded traffic: easy and hard requests and passages.

Whether a draft for a token is accepted depends on how hard that token is, not on the step:

    from position p, k drafts are accepted  <=>  x[p] <= t_1, ..., x[p + k - 1] <= t_k
    x[p] = (e[p] + level[request] + drift[request] + passage[p]) / sd

e is independent between tokens, level between requests.  drift is a first-order autoregressive
process over requests, passage one over the positions of a request.  All are Gaussian, so x has the
standard normal distribution.  The thresholds t_k are calibrated so that, over all positions, the
conditional acceptance at draft position k is the curve's a_k.

If the thresholds do not rise with k (true unless a curve rises steeply), j accepted drafts from p
imply at least j - 1 from p + 1, as with a drafter that sees the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulator.curves import CurveSource
from simulator.errors import require_within
from simulator.sources import DrawnAcceptance

# The sample for the calibration of thresholds; beyond its depth the last threshold is used.
_SAMPLE_REQUESTS, _SAMPLE_POSITIONS, _SAMPLE_DEPTH = 2048, 64, 24
# With fewer survivors the estimate of a threshold is too noisy.
_MIN_SURVIVORS = 1000


@dataclass(frozen=True, slots=True)
class AcceptanceMemory:
    """Describes the correlation of neighbouring tokens and requests, in deviations of e.

    level_spread: standard deviation over requests.  drift_spread, drift_requests: standard
    deviation of the drift, and the number of requests over which its correlation falls to 1/e.
    passage_spread, passage_tokens: the same within a request, over tokens.

    The defaults lie between those of EAGLE on recorded chat, mathematics and code editing
    (`python -m lab.papers memory` fits them).

    Raises InvalidInputError for values out of range.
    """

    level_spread: float = 0.5
    drift_spread: float = 0.0
    drift_requests: float = 100.0
    passage_spread: float = 0.8
    passage_tokens: float = 2.0

    def __post_init__(self) -> None:
        require_within(self, 0, 20, "level_spread", "drift_spread", "passage_spread")
        require_within(self, 1, 1e6, "drift_requests")
        require_within(self, 0.1, 1e4, "passage_tokens")

    @property
    def request_spread(self) -> float:
        """Returns the standard deviation of the parts common to a request: level and drift."""
        return float(np.hypot(self.level_spread, self.drift_spread))

    @property
    def deviation(self) -> float:
        """Returns the standard deviation of the sum of all parts."""
        return float(np.sqrt(1 + self.request_spread**2 + self.passage_spread**2))


@dataclass(frozen=True, slots=True)
class CorrelatedCurves(CurveSource):
    """Draws correlated acceptance.  curves: drafter -> conditional acceptance a_1, a_2, ...

    Positions deeper than the curve reject.  Lengths are drawn as in `Curves`.  memory: drafter ->
    its memory; other drafters have the default.  correlation: between the drafters, in [0, 1], of
    the draws for a token and a request.

    Raises InvalidInputError for the errors of `Curves`, and for a correlation out of range.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    memory: Mapping[str, AcceptanceMemory] = field(default_factory=dict)
    correlation: float = 0.25
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        self.require_curves()
        require_within(self, 0, 1, "correlation")

    def draw_acceptance(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> DrawnAcceptance:
        """Draws the part that the drafters share, then each drafter's own part."""
        requests, positions = len(output_tokens), int(output_tokens.sum())
        shared = _NormalDraws.draw(rng, requests, positions)
        accepted = {}
        for drafter, curve in self.curves.items():
            memory = self.memory.get(drafter, AcceptanceMemory())
            draws = _NormalDraws.draw(rng, requests, positions).correlate_with(
                shared, self.correlation
            )
            x = draws.difficulty(output_tokens, memory) / memory.deviation
            accepted[drafter] = _accepted_lengths(x, calibrate_thresholds(tuple(curve), memory))
        return accepted, None


@lru_cache(maxsize=256)
def calibrate_thresholds(curve: tuple[float, ...], memory: AcceptanceMemory) -> NDArray[np.float64]:
    """Returns [positions of the curve] t_k, calibrated on a fixed sample."""
    rng = np.random.default_rng(0)
    normal = NormalDist()
    # Levels at even quantiles, so that their mean and spread do not depend on the draw.
    level = np.array(
        [normal.inv_cdf((i + 0.5) / _SAMPLE_REQUESTS) for i in range(_SAMPLE_REQUESTS)]
    )
    length = _SAMPLE_POSITIONS + _SAMPLE_DEPTH
    tokens = np.full(_SAMPLE_REQUESTS, length, dtype=np.int64)
    passage_draws = rng.standard_normal(_SAMPLE_REQUESTS * length)
    passage = _autoregressive(passage_draws, tokens, memory.passage_tokens).reshape(
        _SAMPLE_REQUESTS, length
    )
    token_noise = rng.standard_normal((_SAMPLE_REQUESTS, length))
    x = token_noise + memory.request_spread * level[:, None] + memory.passage_spread * passage
    x /= memory.deviation
    alive = np.ones((_SAMPLE_REQUESTS, _SAMPLE_POSITIONS), dtype=bool)
    limits: list[float] = []
    for k, a in enumerate(curve):
        window = x[:, k : k + _SAMPLE_POSITIONS] if k < _SAMPLE_DEPTH else x[:, :0]
        survivors = window[alive] if k < _SAMPLE_DEPTH else window
        if a in {0.0, 1.0}:
            limits.append(-np.inf if a == 0 else np.inf)
        elif k == 0:
            limits.append(normal.inv_cdf(a))
        elif survivors.size >= _MIN_SURVIVORS:
            limits.append(float(np.quantile(survivors, a)))
        else:
            limits.append(limits[-1])
        if k < _SAMPLE_DEPTH:
            alive &= window <= limits[-1]
    return np.array(limits)


@dataclass(frozen=True, slots=True)
class _NormalDraws:
    """Independent standard normal numbers: level, drift [requests]; token, passage [positions]."""

    level: NDArray[np.float64]
    drift: NDArray[np.float64]
    token: NDArray[np.float64]
    passage: NDArray[np.float64]

    @classmethod
    def draw(cls, rng: np.random.Generator, requests: int, positions: int) -> "_NormalDraws":
        sizes = (requests, requests, positions, positions)
        return cls(*(rng.standard_normal(size) for size in sizes))

    def correlate_with(self, shared: "_NormalDraws", correlation: float) -> "_NormalDraws":
        """Mixes in the shared numbers, so that two drafters have this correlation."""
        shared_weight, own_weight = np.sqrt(correlation), np.sqrt(1 - correlation)
        return _NormalDraws(
            shared_weight * shared.level + own_weight * self.level,
            shared_weight * shared.drift + own_weight * self.drift,
            shared_weight * shared.token + own_weight * self.token,
            shared_weight * shared.passage + own_weight * self.passage,
        )

    def difficulty(
        self, output_tokens: NDArray[np.int64], memory: AcceptanceMemory
    ) -> NDArray[np.float64]:
        """Returns [positions] sums of all parts, one request after the other."""
        request_count = np.array([len(self.drift)], dtype=np.int64)
        drift = _autoregressive(self.drift, request_count, memory.drift_requests)
        passage = _autoregressive(self.passage, output_tokens, memory.passage_tokens)
        request_part = memory.level_spread * self.level + memory.drift_spread * drift
        return self.token + memory.passage_spread * passage + np.repeat(request_part, output_tokens)


def _autoregressive(
    draws: NDArray[np.float64], process_lengths: NDArray[np.int64], correlation_length: float
) -> NDArray[np.float64]:
    """Makes stationary autoregressive processes of deviation 1 from independent draws.

    process_lengths: [processes] lengths; their sum is the number of draws.
    """
    process = draws.copy()
    decay = np.exp(-1 / correlation_length)
    innovation = np.sqrt(1 - decay * decay)
    starts = np.cumsum(process_lengths) - process_lengths
    # The processes that reach a position come first.
    longest = np.argsort(-process_lengths, kind="stable")
    running = np.searchsorted(-process_lengths[longest], -np.arange(process_lengths.max(initial=0)))
    for position, count in enumerate(running.tolist()):
        if position:
            indices = starts[longest[:count]] + position
            process[indices] = decay * process[indices - 1] + innovation * process[indices]
    return process


def _accepted_lengths(x: NDArray[np.float64], limits: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Returns [positions] numbers of accepted drafts from each position."""
    positions = len(x)
    # Drafts past the end of the last request are rejected; those of others use the next request.
    padded = np.concatenate((x, np.full(len(limits), np.inf)))
    alive = np.ones(positions, dtype=bool)
    accepted = np.zeros(positions, dtype=np.uint8)
    for k, limit in enumerate(limits.tolist()):
        alive &= padded[k : k + positions] <= limit
        if not alive.any():
            break
        accepted += alive
    return accepted
