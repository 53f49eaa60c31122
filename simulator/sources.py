"""Makes the workloads of scenarios: phases, mixtures, and arrivals that are recorded or drawn."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import InvalidInputError
from simulator.text_files import CsvRow, csv_rows, parse_finite, quote_value
from simulator.workload import (
    AcceptanceSource,
    ClosedLoop,
    OpenLoop,
    PhaseStart,
    RequestPool,
    WorkloadPhase,
)

_MAX_TOKENS = 10_000_000
_MAX_SECONDS = 1e12


def draw_lengths(rng: np.random.Generator, requests: int, mean: float) -> NDArray[np.int64]:
    """Draws [requests] lognormal lengths with this mean, at least 8 tokens."""
    sigma = 0.5
    drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, requests)
    return np.maximum(8, np.rint(drawn)).astype(np.int64)


# [positions] of uint8: accepted drafts by drafter, and the match lengths of a lookup if it has any.
DrawnAcceptance = tuple[dict[str, NDArray[np.uint8]], NDArray[np.uint8] | None]


class DrawnSource(ABC):
    """Draws requests and their acceptance; requests without given lengths have lognormal ones.

    output_tokens_mean, context_tokens_mean: of their own lengths, see `draw_lengths`.
    """

    output_tokens_mean: float
    context_tokens_mean: float

    @abstractmethod
    def draw_acceptance(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> DrawnAcceptance:
        """Draws the acceptance of requests with these lengths, [requests]."""

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws a pool, as `AcceptanceSource.pool` does."""
        if output_tokens is None:
            output_tokens = draw_lengths(rng, requests, self.output_tokens_mean)
        if context_tokens is None:
            context_tokens = draw_lengths(rng, requests, self.context_tokens_mean)
        accepted, matches = self.draw_acceptance(rng, output_tokens)
        return RequestPool(
            context_tokens,
            output_tokens,
            np.cumsum(output_tokens) - output_tokens,
            np.zeros(requests, dtype=np.int64),
            accepted,
            matches=matches,
        )


class _MultiKindSource(ABC):
    """Requests of several kinds, each from a source; `labelled`: the kind is the class label."""

    sources: tuple[AcceptanceSource, ...]
    labelled = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Returns the drafters that every kind has."""
        first_source, *other_sources = self.sources
        return tuple(
            d
            for d in first_source.drafters
            if all(d in source.drafters for source in other_sources)
        )

    @abstractmethod
    def request_kinds(self, rng: np.random.Generator, requests: int) -> NDArray[np.int64]:
        """Returns [requests], the index of the source of each."""

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws every request from the source of its kind, as `AcceptanceSource.pool` does."""
        kinds = self.request_kinds(rng, requests)
        pools = [s.pool(rng, requests, output_tokens, context_tokens) for s in self.sources]
        pool = _merge_pools(pools, kinds)
        if not self.labelled:
            return pool
        names = tuple(s.name for s in self.sources)
        return replace(pool, labels=kinds, label_names=names)


@dataclass(frozen=True, slots=True)
class KindMixture(_MultiKindSource):
    """Requests of several kinds in random order, with their kind as class label if `labelled`."""

    name: str
    sources: tuple[AcceptanceSource, ...]
    weights: tuple[float, ...]
    labelled: bool = False

    def request_kinds(self, rng: np.random.Generator, requests: int) -> NDArray[np.int64]:
        """Draws kinds by weight."""
        share = np.array(self.weights) / sum(self.weights)
        return rng.choice(len(self.sources), size=requests, p=share).astype(np.int64)


@dataclass(frozen=True, slots=True)
class KindByRequest(_MultiKindSource):
    """Requests of several kinds in a given order.  kinds: [requests], indices of `sources`."""

    name: str
    sources: tuple[AcceptanceSource, ...]
    kinds: NDArray[np.int64]

    def request_kinds(self, _: np.random.Generator, requests: int) -> NDArray[np.int64]:
        """Returns the given kinds, repeated if there are more requests."""
        return np.resize(self.kinds, requests)


def _merge_pools(pools: Sequence[RequestPool], kinds: NDArray[np.int64]) -> RequestPool:
    """Takes request i from pool kinds[i], without labels, with the drafters that all pools have.

    The kinds of all pools are numbered consecutively, those of the first pool first.
    """
    chosen = [(pools[kind], i) for i, kind in enumerate(kinds.tolist())]
    output = np.array([pool.output_tokens[i] for pool, i in chosen], dtype=np.int64)
    context = np.array([pool.context_tokens[i] for pool, i in chosen], dtype=np.int64)
    spans = [
        (kind, int(pool.offsets[i]), length)
        for kind, (pool, i), length in zip(kinds.tolist(), chosen, output.tolist(), strict=True)
    ]

    def gather_spans(by_pool: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        return np.concatenate(
            [by_pool[kind][start : start + length] for kind, start, length in spans]
        )

    accepted = {
        drafter: gather_spans([pool.accepted[drafter] for pool in pools])
        for drafter in pools[0].accepted
        if all(drafter in pool.accepted for pool in pools)
    }
    has_matches = any(pool.matches is not None for pool in pools)
    matches = gather_spans([pool.known_matches for pool in pools]) if has_matches else None
    labels = np.zeros(len(chosen), dtype=np.int64)
    counts = [pool.kind_count for pool in pools]
    first_kinds = np.cumsum([0, *counts])
    kinds_of = [pool.request_kinds.tolist() for pool in pools]
    kinds_in_pool = [kinds_of[kind][i] for i, kind in enumerate(kinds.tolist())]
    true_kinds: NDArray[np.int64] = first_kinds[kinds] + np.array(kinds_in_pool, dtype=np.int64)
    starts = np.cumsum(output) - output
    return RequestPool(context, output, starts, labels, accepted, kinds=true_kinds, matches=matches)


@dataclass(frozen=True, slots=True)
class MeanTokens:
    """Mean lengths of requests, in tokens; lognormal around them (sigma 0.5), at least 8.

    None: the lengths that the source of acceptance has.
    """

    output: float | None = 256.0
    context: float | None = 384.0


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A phase before its requests are drawn; see `workload.WorkloadPhase`.

    mean_tokens: None takes those of the `ClosedSource`.
    """

    name: str
    acceptance: AcceptanceSource
    concurrency: int
    tokens: int
    begins: PhaseStart = PhaseStart.DRAINED
    mean_tokens: MeanTokens | None = None


@dataclass(frozen=True, slots=True)
class ClosedSource:
    """A closed loop: equal acceptance and lengths mean equal requests.

    Phases of equal mean lengths have requests of equal lengths, whatever their acceptance is; a
    phase that begins `CHANGED` needs that.  output_mean, context_mean: see `MeanTokens`.  requests:
    in the pool of every phase, at least; they are served in turn, again and again.
    """

    phases: tuple[PhaseSpec, ...]
    output_mean: float | None = 256.0
    context_mean: float | None = 384.0
    requests: int = 256

    def __call__(self, seed: int) -> ClosedLoop:
        """Makes the workload of a seed."""
        rng = np.random.default_rng([seed, 1])
        requests = max(self.requests, 2 * max(p.concurrency for p in self.phases))
        default = MeanTokens(self.output_mean, self.context_mean)
        means = [p.mean_tokens or default for p in self.phases]
        output = _draw_lengths_by_mean(rng, requests, [mean.output for mean in means])
        context = _draw_lengths_by_mean(rng, requests, [mean.context for mean in means])
        pools: dict[tuple[int, MeanTokens], RequestPool] = {}
        phases = []
        for spec, mean in zip(self.phases, means, strict=True):
            key = id(spec.acceptance), mean
            if key not in pools:
                pools[key] = spec.acceptance.pool(
                    rng, requests, output[mean.output], context[mean.context]
                )
            phases.append(
                WorkloadPhase(spec.name, pools[key], spec.concurrency, spec.tokens, spec.begins)
            )
        return ClosedLoop(tuple(phases))


def _draw_lengths_by_mean(
    rng: np.random.Generator, requests: int, means: Sequence[float | None]
) -> dict[float | None, NDArray[np.int64] | None]:
    """Mean -> lengths, drawn once for each mean in the order of its first use."""
    return {
        mean: None if mean is None else draw_lengths(rng, requests, mean)
        for mean in dict.fromkeys(means)
    }


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Requests at recorded or drawn times, with acceptance from a source.

    arrival_seconds: [requests].  context_tokens, output_tokens: [requests], or None for the lengths
    that the source of acceptance has.
    """

    acceptance: AcceptanceSource
    arrival_seconds: NDArray[np.float64]
    context_tokens: NDArray[np.int64] | None
    output_tokens: NDArray[np.int64] | None
    max_concurrency: int
    window_seconds: float

    def __call__(self, seed: int) -> OpenLoop:
        """Makes the workload of a seed: the times stay the same, the acceptance is drawn again."""
        rng = np.random.default_rng([seed, 2])
        pool = self.acceptance.pool(
            rng, len(self.arrival_seconds), self.output_tokens, self.context_tokens
        )
        return OpenLoop(pool, self.arrival_seconds, self.max_concurrency, self.window_seconds)


_TIME_COLUMN, _CONTEXT_COLUMN, _OUTPUT_COLUMN = "timestamp", "contexttokens", "generatedtokens"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order in which they come.

    arrival_seconds: [requests] of float64, ascending, from 0.  context_tokens, output_tokens:
    [requests] of int64.
    """

    arrival_seconds: NDArray[np.float64]
    context_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def read_arrivals(path: str | Path, limit: int | None = None, speed: float = 1.0) -> Arrivals:
    """Reads a CSV with TIMESTAMP, ContextTokens, GeneratedTokens, as Azure's LLM traces have.

    Column names in any case and order, further columns are left out.  TIMESTAMP: ISO 8601 (a blank
    for the T, more than six decimals and a time zone are accepted) or seconds as a number, the same
    in all rows.  limit: number of requests to read.  speed: with 2 the requests arrive twice as
    fast.

    Raises InvalidInputError with the line: a column, field or number that is missing, a time that
    is invalid or lies before the one above it, an output below 1; and for a file without a request.
    """
    if limit is not None and limit < 1:
        raise InvalidInputError(path, 0, f"limit {limit} must be 1 or more")
    if not (math.isfinite(speed) and speed > 0):
        raise InvalidInputError(path, 0, f"a speed of {speed} is out of range, 1 is as recorded")
    times: list[float | datetime] = []
    seconds: list[float] = []
    contexts: list[int] = []
    outputs: list[int] = []
    rows = csv_rows(
        Path(path), (_TIME_COLUMN, _CONTEXT_COLUMN, _OUTPUT_COLUMN), allow_other_columns=True
    )
    for row in itertools.islice(rows, limit):
        times.append(_parse_time(row))
        seconds.append(_seconds_after(row, times[0], times[-1]))
        if len(seconds) > 1 and seconds[-1] < seconds[-2]:
            raise row.make_error(
                f"{_TIME_COLUMN} {quote_value(row.text(_TIME_COLUMN))} lies before that of the row "
                "above"
            )
        contexts.append(row.integer(_CONTEXT_COLUMN, 0, _MAX_TOKENS))
        outputs.append(row.integer(_OUTPUT_COLUMN, 1, _MAX_TOKENS))
    return Arrivals(
        np.array(seconds, dtype=np.float64) / speed,
        np.array(contexts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
    )


def poisson_seconds(
    rng: np.random.Generator, rates: Sequence[tuple[int, float]]
) -> NDArray[np.float64]:
    """[requests] arrival times of a Poisson process, ascending, in seconds from its beginning.

    rates: (seconds, requests per second) one after the other.
    """
    per_second = np.repeat([rate for _, rate in rates], [seconds for seconds, _ in rates])
    counts = rng.poisson(per_second)
    return np.sort(np.repeat(np.arange(len(counts)), counts) + rng.random(counts.sum()))


def _parse_time(row: CsvRow) -> float | datetime:
    text = row.text(_TIME_COLUMN)
    seconds = parse_finite(text)
    if seconds is None:
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise row.make_error(
                f"{_TIME_COLUMN} {quote_value(text)} is neither a time nor a number of seconds"
            ) from error
    if abs(seconds) > _MAX_SECONDS:
        raise row.make_error(f"{_TIME_COLUMN} {quote_value(text)} is not a number of seconds")
    return seconds


def _seconds_after(row: CsvRow, start: float | datetime, time: float | datetime) -> float:
    if isinstance(start, float) and isinstance(time, float):
        return time - start
    if isinstance(start, datetime) and isinstance(time, datetime):
        if (start.tzinfo is None) == (time.tzinfo is None):
            return (time - start).total_seconds()
        raise row.make_error(f"{_TIME_COLUMN}: some rows name a time zone and some do not")
    raise row.make_error(f"{_TIME_COLUMN}: some rows are numbers of seconds and some are dates")
