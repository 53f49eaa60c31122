"""Acceptance with the memory of recorded traffic: easy and hard requests, easy and hard passages.

Whether a draft for a token is accepted depends on how hard that token is, not on where it began:

    from position p, k drafts are accepted  <=>  x[p] <= t_1, ..., x[p + k - 1] <= t_k
    x[p] = (e[p] + level[request] + drift[request] + passage[p]) / sd

e is independent from token to token, level from request to request; drift is a first-order
autoregressive process over requests, passage one over the positions of a request.  All are
Gaussian, so that x has the standard normal distribution.  The thresholds t_k are such that, over
all positions, the conditional acceptance at draft position k is the curve's a_k.

Where the thresholds do not rise with k, which holds unless a curve rises steeply, j drafts accepted
from p mean at least j - 1 from p + 1, as with a drafter that sees the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from controller.simulation.curves import require_curve, require_mean_tokens
from controller.simulation.errors import InvalidInputError
from controller.simulation.sources import lengths
from controller.simulation.workload import RequestPool

# The sample that thresholds are calibrated on; beyond its depth the last threshold serves.
_REQUESTS, _POSITIONS, _DEPTH = 2048, 64, 24
# Fewer survivors than this leave a threshold to luck.
_SURVIVORS_MIN = 1000


@dataclass(frozen=True, slots=True)
class Memory:
    """Says how much neighbours have in common, in units of the deviation of e.

    level_spread: standard deviation over requests.  drift_spread, drift_requests: standard
    deviation of the drift, and the number of requests over which its correlation falls to 1/e.
    passage_spread, passage_tokens: the same within a request, over tokens.  correlation: between
    the drafters, of every part, 0 to 1.

    The defaults are close to recorded chat, code and mathematics; docs/simulation.md has the fits.

    Raises InvalidInputError for values out of range.
    """

    level_spread: float = 0.4
    drift_spread: float = 0.0
    drift_requests: float = 100.0
    passage_spread: float = 0.5
    passage_tokens: float = 15.0
    correlation: float = 0.4

    def __post_init__(self) -> None:
        checks = (
            ("level_spread", 0 <= self.level_spread <= 5),
            ("drift_spread", 0 <= self.drift_spread <= 5),
            ("drift_requests", 1 <= self.drift_requests <= 1e6),
            ("passage_spread", 0 <= self.passage_spread <= 5),
            ("passage_tokens", 0.1 <= self.passage_tokens <= 1e4),
            ("correlation", 0 <= self.correlation <= 1),
        )
        for name, good in checks:
            if not good:
                raise InvalidInputError(name, 0, f"{getattr(self, name)} is out of range")

    @property
    def request_spread(self) -> float:
        """Standard deviation of what a request has in common: its level and the drift."""
        return float(np.hypot(self.level_spread, self.drift_spread))

    @property
    def deviation(self) -> float:
        """Standard deviation of the sum of all parts."""
        return float(np.sqrt(1 + self.request_spread**2 + self.passage_spread**2))


@dataclass(frozen=True, slots=True)
class Chain:
    """Draws acceptance with memory.  curves: drafter -> conditional acceptance a_1, a_2, ...

    Positions deeper than the curve reject.  Lengths are those of `Curves`.

    Raises InvalidInputError for what `Curves` refuses.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    memory: Memory = field(default_factory=Memory)
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        if not self.curves:
            raise InvalidInputError(self.name, 0, "no drafter is named")
        for drafter, curve in self.curves.items():
            require_curve(f"{self.name}, {drafter or 'a drafter without name'}", curve)
        for mean in (self.output_tokens_mean, self.context_tokens_mean):
            require_mean_tokens(self.name, mean)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that have a curve."""
        return tuple(self.curves)

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws a pool, as `AcceptanceSource.pool` does."""
        if output_tokens is None:
            output_tokens = lengths(rng, requests, self.output_tokens_mean)
        if context_tokens is None:
            context_tokens = lengths(rng, requests, self.context_tokens_mean)
        memory, common = self.memory, self.memory.correlation
        shared = _difficulty(rng, output_tokens, memory)
        accepted = {}
        for drafter, curve in self.curves.items():
            own = _difficulty(rng, output_tokens, memory)
            x = (np.sqrt(common) * shared + np.sqrt(1 - common) * own) / memory.deviation
            accepted[drafter] = _accepted(x, thresholds(tuple(curve), memory))
        return RequestPool(
            context_tokens,
            output_tokens,
            np.cumsum(output_tokens) - output_tokens,
            np.zeros(requests, dtype=np.int64),
            accepted,
        )


@lru_cache(maxsize=256)
def thresholds(curve: tuple[float, ...], memory: Memory) -> NDArray[np.float64]:
    """[positions of the curve] t_k, calibrated on a fixed sample."""
    rng = np.random.default_rng(0)
    normal = NormalDist()
    # Levels at even quantiles: their mean and spread are not left to the draw.
    level = np.array([normal.inv_cdf((i + 0.5) / _REQUESTS) for i in range(_REQUESTS)])
    length = _POSITIONS + _DEPTH
    tokens = np.full(_REQUESTS, length, dtype=np.int64)
    within = _passages(rng, tokens, memory.passage_tokens).reshape(_REQUESTS, length)
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


def _difficulty(
    rng: np.random.Generator, output_tokens: NDArray[np.int64], memory: Memory
) -> NDArray[np.float64]:
    """[positions] the sum of all parts, one request after the other."""
    requests = len(output_tokens)
    of_request = memory.level_spread * rng.standard_normal(requests)
    of_request += memory.drift_spread * _wander(rng, requests, memory.drift_requests)
    parts: NDArray[np.float64] = rng.standard_normal(int(output_tokens.sum()))
    parts += memory.passage_spread * _passages(rng, output_tokens, memory.passage_tokens)
    return parts + np.repeat(of_request, output_tokens)


def _wander(rng: np.random.Generator, steps: int, memory: float) -> NDArray[np.float64]:
    """[steps] a stationary first-order autoregressive process of deviation 1."""
    return _passages(rng, np.array([steps], dtype=np.int64), memory)


def _passages(
    rng: np.random.Generator, output_tokens: NDArray[np.int64], memory: float
) -> NDArray[np.float64]:
    """[positions] such a process in each request, independent between requests."""
    keep = np.exp(-1 / memory)
    found: NDArray[np.float64] = rng.standard_normal(int(output_tokens.sum()))
    starts = np.cumsum(output_tokens) - output_tokens
    # Requests that are still running at a position come first.
    longest = np.argsort(-output_tokens, kind="stable")
    running = np.searchsorted(-output_tokens[longest], -np.arange(output_tokens.max(initial=0)))
    fresh = np.sqrt(1 - keep * keep)
    for position, count in enumerate(running.tolist()):
        if position:
            at = starts[longest[:count]] + position
            found[at] = keep * found[at - 1] + fresh * found[at]
    return found


def _accepted(x: NDArray[np.float64], limits: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[positions] drafts that are accepted from each position on."""
    positions = len(x)
    # The last request's drafts past its end are rejected, the others' read on in the next request.
    padded = np.concatenate((x, np.full(len(limits), np.inf)))
    alive = np.ones(positions, dtype=bool)
    accepted = np.zeros(positions, dtype=np.uint8)
    for k, limit in enumerate(limits.tolist()):
        alive &= padded[k : k + positions] <= limit
        if not alive.any():
            break
        accepted += alive
    return accepted
