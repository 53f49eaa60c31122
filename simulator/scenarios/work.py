"""Defines the sections `phases` and `arrivals`: which requests run when."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from simulator.scenarios import fields
from simulator.scenarios.traffic import KindSection
from simulator.sources import (
    ClosedSource,
    KindByRequest,
    MeanTokens,
    OpenSource,
    PhaseSpec,
    draw_lengths,
    poisson_seconds,
    read_arrivals,
)
from simulator.surface import CostSurface
from simulator.workload import AcceptanceSource, PhaseStart

_MAX_PHASES = 20_000
_MAX_REQUESTS = 5_000_000
_MAX_SECONDS = 10_000_000
# Output tokens of all requests of a kind, which are held in memory.
_MAX_POSITIONS = 200_000_000
# The sample for the tokens per step: number of requests, and the limit of their mean length.
_SAMPLE_REQUESTS, _SAMPLE_TOKENS = 64, 1000.0

_Steps = Annotated[fields.Integer, Field(ge=1, le=100_000_000)]
_Duration = Annotated[fields.Integer, Field(ge=1, le=10_000_000)]


class PhaseSection(fields.Section):
    """A phase of a closed loop: `batch` sequences of one kind run at a time.

    Its length is given either in tokens, the mean gain of a sequence, or in steps of the arm that
    is best in it; steps are converted to tokens, so that all policies do the same work.
    begins: "drained": running requests finish first; "changed": they switch to the acceptance of
    this phase at its first step; "replaced": they are suspended at its first step in favour of
    requests of this phase, and continue when a phase of their kind, context and batch returns.
    context_tokens_mean: replaces that of the kind, tokens.
    """

    kind: fields.KindName
    batch: fields.BatchSize
    tokens: _Steps | None = None
    steps: _Steps | None = None
    begins: PhaseStart = PhaseStart.DRAINED
    context_tokens_mean: fields.MeanLength | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        self.require_exactly_one("tokens", "steps")
        return self


class RateSection(fields.Section):
    """An interval of Poisson arrivals.  kind: of its requests; by default that of `arrivals`."""

    seconds: _Duration
    requests_per_second: Annotated[fields.Number, Field(ge=0, le=100_000)]
    kind: fields.KindName | None = None


class ArrivalsSection(fields.Section):
    """Requests with arrival times: exactly one of `file` and `rates`.

    file: CSV of arrivals, relative to the scenario file; limit: number of requests to read; speed:
    with 2 they arrive twice as fast.
    rates: intervals of Poisson arrivals, one after the other, `repeat` times; seed: of the draw of
    times and lengths, which are the same in all repetitions of the scenario.
    kind: of the requests.  context_tokens_mean, output_tokens_mean: lengths of drawn requests; by
    default those of the kind.  window_seconds: length of the oracle's segments.
    """

    file: fields.FileName | None = None
    limit: Annotated[fields.Integer, Field(ge=1)] | None = None
    speed: fields.Factor = 1.0
    rates: Annotated[tuple[RateSection, ...], Field(min_length=1)] | None = None
    repeat: Annotated[fields.Integer, Field(ge=1, le=100_000)] = 1
    seed: fields.SeedNumber = 0
    kind: fields.KindName
    context_tokens_mean: fields.MeanLength | None = None
    output_tokens_mean: fields.MeanLength | None = None
    window_seconds: Annotated[fields.Number, Field(gt=0, le=1e6)] = 10.0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.require_exactly_one("file", "rates") == "rates":
            self.refuse_combination("rates", "limit", "speed")
        else:
            self.refuse_combination("file", "repeat", "context_tokens_mean", "output_tokens_mean")
        return self


Kinds = Mapping[str, KindSection]
Sources = Mapping[str, AcceptanceSource]


def make_closed_loop(
    phases: tuple[PhaseSection, ...],
    repeat: int,
    requests: int,
    kinds: Kinds,
    sources: Sources,
    surface: CostSurface,
    locations: fields.FieldLocations,
) -> ClosedSource:
    """Makes the closed loop of a list of phases that is run `repeat` times.

    requests: different ones of each kind, at least.
    """
    if len(phases) * repeat > _MAX_PHASES:
        fault = f"{repeat} times {len(phases)} phases are more than {_MAX_PHASES}"
        raise locations.make_error(("repeat",), fault)
    for i, phase in enumerate(phases):
        require_kind(phase.kind, kinds, locations, "phases", i, "kind")
    step_worth = _BestArmTokens(surface)
    specs = []
    for i, phase in enumerate(phases):
        if phase.batch > surface.max_batch_size:
            fault = (
                f"{phase.batch} sequences are more than the {surface.max_batch_size} of the engine"
            )
            raise locations.make_error(("phases", i, "batch"), fault)
        mean = kinds[phase.kind].mean_tokens
        if phase.context_tokens_mean is not None:
            mean = MeanTokens(mean.output, phase.context_tokens_mean)
        _require_fits_memory(max(requests, 2 * phase.batch), mean, locations, "phases", i)
        if phase.begins is PhaseStart.CHANGED and (i or repeat > 1):
            previous_mean = kinds[phases[i - 1].kind].mean_tokens
            _require_equal_lengths(previous_mean, mean, locations, "phases", i, "begins")
        source = sources[phase.kind]
        if phase.tokens is not None:
            tokens = phase.batch * phase.tokens
        else:
            assert phase.steps is not None
            tokens = max(
                1, round(phase.steps * step_worth.tokens_per_step(source, mean, phase.batch))
            )
        name = f"{phase.kind} x{phase.batch}"
        specs.append(PhaseSpec(name, source, phase.batch, tokens, phase.begins, mean))
    return ClosedSource(tuple(specs) * repeat, requests=requests)


class _BestArmTokens:
    """Computes the true tokens per step of the best arm, from a sample of the requests."""

    def __init__(self, surface: CostSurface) -> None:
        # Mixtures are omitted, because their gain depends on rules.
        self._surface = surface.without_mixtures
        self._samples: dict[tuple[int, MeanTokens], tuple[NDArray[np.float64], float]] = {}

    def tokens_per_step(self, source: AcceptanceSource, mean: MeanTokens, batch: int) -> float:
        """Returns tokens a step of `batch` sequences."""
        gained, context = self._sample(source, mean)
        seconds = self._surface.step_seconds(batch, batch * context)
        return batch * float(gained[np.argmax(gained / seconds)])

    def _sample(
        self, source: AcceptanceSource, mean: MeanTokens
    ) -> tuple[NDArray[np.float64], float]:
        """Returns [arms] tokens a sequence and step, and the mean context of a running sequence."""
        key = id(source), mean
        if key not in self._samples:
            rng = np.random.default_rng(0)
            output = None
            if mean.output is not None:
                output = draw_lengths(rng, _SAMPLE_REQUESTS, min(mean.output, _SAMPLE_TOKENS))
            pool = source.pool(rng, _SAMPLE_REQUESTS, output)
            gained = [pool.tokens_per_step(d.name, d.gammas) for d in self._surface.drafters]
            context = float(pool.context_tokens.mean()) if mean.context is None else mean.context
            half_output = (
                float(pool.output_tokens.mean() if mean.output is None else mean.output) / 2
            )
            self._samples[key] = np.concatenate(gained), context + half_output
        return self._samples[key]


def _require_fits_memory(
    requests: int, mean: MeanTokens, locations: fields.FieldLocations, *path: str | int
) -> None:
    if mean.output is not None and requests * mean.output > _MAX_POSITIONS:
        fault = f"{requests} requests of {mean.output:g} tokens are more than can be held in memory"
        raise locations.make_error(path, fault)


def _require_equal_lengths(
    previous_mean: MeanTokens,
    current_mean: MeanTokens,
    locations: fields.FieldLocations,
    *path: str | int,
) -> None:
    if current_mean.output is None or current_mean.output != previous_mean.output:
        raise locations.make_error(
            path,
            "running requests can change over only to a kind with the same output_tokens_mean; "
            "set it for both kinds",
        )


def make_open_loop(
    section: ArrivalsSection,
    kinds: Kinds,
    sources: Sources,
    max_batch_size: int,
    folder: Path,
    locations: fields.FieldLocations,
) -> OpenSource:
    """Makes the open loop of recorded or drawn arrivals."""
    require_kind(section.kind, kinds, locations, "arrivals", "kind")
    if section.file is not None:
        with locations.errors_at("arrivals", "file"):
            recorded = read_arrivals(folder / section.file, section.limit, section.speed)
        return OpenSource(
            sources[section.kind], recorded.arrival_seconds, recorded.context_tokens,
            recorded.output_tokens, max_batch_size, section.window_seconds,
        )  # fmt: skip
    rate_cycle = section.rates or ()
    for i, rate in enumerate(rate_cycle):
        require_kind(rate.kind or section.kind, kinds, locations, "arrivals", "rates", i, "kind")
    seconds = section.repeat * sum(rate.seconds for rate in rate_cycle)
    expected = section.repeat * sum(rate.seconds * rate.requests_per_second for rate in rate_cycle)
    for value, unit, limit in (
        (seconds, "seconds", _MAX_SECONDS),
        (expected, "requests", _MAX_REQUESTS),
    ):
        if value > limit:
            raise locations.make_error(("arrivals",), f"{value:.0f} {unit} are more than {limit}")
    rates = rate_cycle * section.repeat
    rng = np.random.default_rng(section.seed)
    times = poisson_seconds(rng, [(rate.seconds, rate.requests_per_second) for rate in rates])
    requests = len(times)
    if requests == 0:
        raise locations.make_error(("arrivals", "rates"), "no request arrives; raise the rates")
    mean = kinds[section.kind].mean_tokens
    mean = MeanTokens(
        section.output_tokens_mean or mean.output, section.context_tokens_mean or mean.context
    )
    _require_fits_memory(requests, mean, locations, "arrivals")
    context, output = (
        None if mean_length is None else draw_lengths(rng, requests, mean_length)
        for mean_length in (mean.context, mean.output)
    )
    # An interval ends where the next one begins.
    ends = list(itertools.accumulate(rate.seconds for rate in rates))
    stretch = np.searchsorted(ends, times, side="right")
    names = list(dict.fromkeys(rate.kind or section.kind for rate in rates))
    by_stretch = np.array([names.index(rate.kind or section.kind) for rate in rates])
    source = sources[section.kind]
    if len(names) > 1:
        parts = tuple(sources[name] for name in names)
        source = KindByRequest("arrivals", parts, by_stretch[stretch])
    return OpenSource(
        source, times - times[0], context, output, max_batch_size, section.window_seconds
    )


def require_kind(
    kind: str, kinds: Kinds, locations: fields.FieldLocations, *path: str | int
) -> None:
    """Raises InvalidInputError about this field for a kind that `traffic` does not have."""
    if kind not in kinds:
        raise locations.make_error(
            path, f"traffic has no kind {kind!r}; there are {', '.join(kinds)}"
        )
