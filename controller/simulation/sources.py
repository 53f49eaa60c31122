"""Makes the workloads of scenarios: phases, mixtures and arrivals from acceptance sources."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.simulation.workload import (
    AcceptanceSource,
    ClosedLoop,
    OpenLoop,
    RequestPool,
    WorkloadPhase,
)

# Requests in a phase's pool, at least; they are served in turn, again and again.
_POOL_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Mixture:
    """Requests of several kinds in random order, with their kind as class label if `labelled`."""

    name: str
    sources: tuple[AcceptanceSource, ...]
    weights: tuple[float, ...]
    labelled: bool = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Lists drafters that every kind knows."""
        first, *others = self.sources
        return tuple(d for d in first.drafters if all(d in other.drafters for other in others))

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws every request from one source, drawn by weight."""
        share = np.array(self.weights) / sum(self.weights)
        kinds = rng.choice(len(self.sources), size=requests, p=share)
        pools = [s.pool(rng, requests, output_tokens, context_tokens) for s in self.sources]
        chosen = [(pools[kind], i) for i, kind in enumerate(kinds)]
        output = np.array([pool.output_tokens[i] for pool, i in chosen], dtype=np.int64)
        context = np.array([pool.context_tokens[i] for pool, i in chosen], dtype=np.int64)
        accepted = {}
        for drafter in pools[0].accepted:
            parts = []
            for (pool, i), length in zip(chosen, output.tolist(), strict=True):
                start = int(pool.offsets[i])
                parts.append(pool.accepted[drafter][start : start + length])
            accepted[drafter] = np.concatenate(parts)
        labels, names = kinds.astype(np.int64), tuple(s.name for s in self.sources)
        if not self.labelled:
            labels, names = np.zeros(len(kinds), dtype=np.int64), ("",)
        return RequestPool(context, output, np.cumsum(output) - output, labels, accepted, names)


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A phase before its requests are drawn; see `workload.WorkloadPhase`."""

    name: str
    acceptance: AcceptanceSource
    concurrency: int
    tokens: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ClosedSource:
    """A closed loop: equal acceptance means equal requests, and all pools have equal lengths.

    output_mean, context_mean: tokens; lengths are lognormal around them (sigma 0.5), at least 8.
    None: the sources' own lengths (then no phase may change over `at_once`).
    """

    phases: tuple[PhaseSpec, ...]
    output_mean: float | None = 256.0
    context_mean: float = 384.0

    def __call__(self, seed: int) -> ClosedLoop:
        """Makes the workload of a seed."""
        rng = np.random.default_rng([seed, 1])
        requests = max(_POOL_REQUESTS, 2 * max(p.concurrency for p in self.phases))
        output = context = None
        if self.output_mean is not None:
            output = lengths(rng, requests, self.output_mean)
            context = lengths(rng, requests, self.context_mean)
        pools: dict[int, RequestPool] = {}
        for spec in self.phases:
            if id(spec.acceptance) not in pools:
                pools[id(spec.acceptance)] = spec.acceptance.pool(rng, requests, output, context)
        return ClosedLoop(
            tuple(
                WorkloadPhase(p.name, pools[id(p.acceptance)], p.concurrency, p.tokens, p.at_once)
                for p in self.phases
            )
        )


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Requests at recorded or drawn times; acceptance from a source, in turn.

    arrival_seconds, context_tokens, output_tokens: [requests].
    """

    acceptance: AcceptanceSource
    arrival_seconds: NDArray[np.float64]
    context_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_concurrency: int
    window_seconds: float

    def __call__(self, seed: int) -> OpenLoop:
        """Makes the workload of a seed: the times stay the same, the acceptance is drawn again."""
        rng = np.random.default_rng([seed, 2])
        pool = self.acceptance.pool(
            rng, len(self.arrival_seconds), self.output_tokens, self.context_tokens
        )
        return OpenLoop(pool, self.arrival_seconds, self.max_concurrency, self.window_seconds)


def lengths(rng: np.random.Generator, requests: int, mean: float) -> NDArray[np.int64]:
    """[requests] lognormal lengths of this mean, at least 8 tokens."""
    sigma = 0.5
    drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, requests)
    return np.maximum(8, np.rint(drawn)).astype(np.int64)
