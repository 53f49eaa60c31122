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
from simulator.sources import Drawn

# The sample for the calibration of thresholds; beyond its depth the last threshold is used.
_REQUESTS, _POSITIONS, _DEPTH = 2048, 64, 24
# With fewer survivors the estimate of a threshold is too noisy.
_SURVIVORS_MIN = 1000


@dataclass(frozen=True, slots=True)
class Memory:
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
class Chain(CurveSource):
    """Draws correlated acceptance.  curves: drafter -> conditional acceptance a_1, a_2, ...

    Positions deeper than the curve reject.  Lengths are drawn as in `Curves`.  memory: drafter ->
    its memory; other drafters have the default.  correlation: between the drafters, in [0, 1], of
    the draws for a token and a request.

    Raises InvalidInputError for the errors of `Curves`, and for a correlation out of range.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    memory: Mapping[str, Memory] = field(default_factory=dict)
    correlation: float = 0.25
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        self.require_curves()
        require_within(self, 0, 1, "correlation")

    def drawn(self, rng: np.random.Generator, output_tokens: NDArray[np.int64]) -> Drawn:
        """Draws the part that the drafters share, then each drafter's own part."""
        requests, positions = len(output_tokens), int(output_tokens.sum())
        shared = _Draws.of(rng, requests, positions)
        accepted = {}
        for drafter, curve in self.curves.items():
            memory = self.memory.get(drafter, Memory())
            draws = _Draws.of(rng, requests, positions).mixed(shared, self.correlation)
            x = draws.difficulty(output_tokens, memory) / memory.deviation
            accepted[drafter] = _accepted(x, thresholds(tuple(curve), memory))
        return accepted, None


@lru_cache(maxsize=256)
def thresholds(curve: tuple[float, ...], memory: Memory) -> NDArray[np.float64]:
    """Returns [positions of the curve] t_k, calibrated on a fixed sample."""
    rng = np.random.default_rng(0)
    normal = NormalDist()
    # Levels at even quantiles, so that their mean and spread do not depend on the draw.
    level = np.array([normal.inv_cdf((i + 0.5) / _REQUESTS) for i in range(_REQUESTS)])
    length = _POSITIONS + _DEPTH
    tokens = np.full(_REQUESTS, length, dtype=np.int64)
    drawn = rng.standard_normal(_REQUESTS * length)
    within = _remembered(drawn, tokens, memory.passage_tokens).reshape(_REQUESTS, length)
    white = rng.standard_normal((_REQUESTS, length))
    x = white + memory.request_spread * level[:, None] + memory.passage_spread * within
    x /= memory.deviation
    alive = np.ones((_REQUESTS, _POSITIONS), dtype=bool)
    found: list[float] = []
    for k, a in enumerate(curve):
        here = x[:, k : k + _POSITIONS] if k < _DEPTH else x[:, :0]
        survivors = here[alive] if k < _DEPTH else here
        if a in {0.0, 1.0}:
            found.append(-np.inf if a == 0 else np.inf)
        elif k == 0:
            found.append(normal.inv_cdf(a))
        elif survivors.size >= _SURVIVORS_MIN:
            found.append(float(np.quantile(survivors, a)))
        else:
            found.append(found[-1])
        if k < _DEPTH:
            alive &= here <= found[-1]
    return np.array(found)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Independent standard normal numbers: level, drift [requests]; token, passage [positions]."""

    level: NDArray[np.float64]
    drift: NDArray[np.float64]
    token: NDArray[np.float64]
    passage: NDArray[np.float64]

    @classmethod
    def of(cls, rng: np.random.Generator, requests: int, positions: int) -> "_Draws":
        sizes = (requests, requests, positions, positions)
        return cls(*(rng.standard_normal(size) for size in sizes))

    def mixed(self, shared: "_Draws", correlation: float) -> "_Draws":
        """Mixes in the shared numbers, so that two drafters have this correlation."""
        common, own = np.sqrt(correlation), np.sqrt(1 - correlation)
        return _Draws(
            common * shared.level + own * self.level,
            common * shared.drift + own * self.drift,
            common * shared.token + own * self.token,
            common * shared.passage + own * self.passage,
        )

    def difficulty(self, output_tokens: NDArray[np.int64], memory: Memory) -> NDArray[np.float64]:
        """Returns [positions] sums of all parts, one request after the other."""
        whole = np.array([len(self.drift)], dtype=np.int64)
        drift = _remembered(self.drift, whole, memory.drift_requests)
        passage = _remembered(self.passage, output_tokens, memory.passage_tokens)
        of_request = memory.level_spread * self.level + memory.drift_spread * drift
        return self.token + memory.passage_spread * passage + np.repeat(of_request, output_tokens)


def _remembered(
    draws: NDArray[np.float64], pieces: NDArray[np.int64], memory: float
) -> NDArray[np.float64]:
    """Makes stationary autoregressive processes of deviation 1 from independent draws.

    pieces: [processes] lengths; their sum is the number of draws.
    """
    found = draws.copy()
    keep = np.exp(-1 / memory)
    fresh = np.sqrt(1 - keep * keep)
    starts = np.cumsum(pieces) - pieces
    # The processes that reach a position come first.
    longest = np.argsort(-pieces, kind="stable")
    running = np.searchsorted(-pieces[longest], -np.arange(pieces.max(initial=0)))
    for position, count in enumerate(running.tolist()):
        if position:
            at = starts[longest[:count]] + position
            found[at] = keep * found[at - 1] + fresh * found[at]
    return found


def _accepted(x: NDArray[np.float64], limits: NDArray[np.float64]) -> NDArray[np.uint8]:
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
