"""Defines a scenario file, and makes the scenario that it describes."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from simulator.engine import EngineOptions, Prefill
from simulator.scenario import Scenario
from simulator.scenarios.cost import CostSection
from simulator.scenarios.fields import (
    BatchSize,
    KindName,
    LogSpread,
    Number,
    Seconds,
    Section,
    Share,
    Whole,
)
from simulator.scenarios.place import Place
from simulator.scenarios.profile import ProfileSection
from simulator.scenarios.traffic import KindSection, sources
from simulator.scenarios.work import (
    ArrivalsSection,
    PhaseSection,
    closed_loop,
    open_loop,
)
from simulator.sources import ClosedSource, OpenSource
from simulator.surface import CostSurface
from simulator.workload import AcceptanceSource

_DEFAULT = EngineOptions()
_ABOVE_ONE = Annotated[Number, Field(ge=1, le=10_000)]


class EngineSection(Section):
    """Describes how the simulated engine behaves.

    max_batch_size: sequences at a time; by default the largest batch whose costs are known.
    lag_steps: steps by which telemetry and plan are late.
    step_noise: standard deviation of the logarithm of a step's seconds.  outlier_share of the steps
    take outlier_factor as long.  pace: standard deviation of the logarithm of the machine's pace,
    which stays for some fifty steps.
    prefill: "none" (disaggregated) or "chunked", with prefill_chunk_tokens a pass.
    warm_factor: a step at gamma = 0 costs this much when a drafter is kept in step.
    stale_steps: for so many steps after a sleep longer than stale_after steps, drafts are accepted
    with stale_acceptance of their usual probability.
    """

    max_batch_size: BatchSize | None = None
    lag_steps: Annotated[Whole, Field(ge=0, le=64)] = _DEFAULT.lag
    step_noise: LogSpread = _DEFAULT.noise
    outlier_share: Annotated[Share, Field(lt=1)] = _DEFAULT.outlier_share
    outlier_factor: _ABOVE_ONE = _DEFAULT.outlier_factor
    pace: LogSpread = _DEFAULT.pace
    prefill: Prefill = _DEFAULT.prefill
    prefill_chunk_tokens: Annotated[Whole, Field(ge=1, le=10_000_000)] = (
        _DEFAULT.prefill_chunk_tokens
    )
    warm_factor: _ABOVE_ONE = _DEFAULT.warm_factor
    stale_after: Annotated[Whole, Field(ge=0, le=1_000_000)] = _DEFAULT.stale_after
    stale_steps: Annotated[Whole, Field(ge=0, le=1_000_000)] = _DEFAULT.stale_steps
    stale_acceptance: Share = _DEFAULT.stale_acceptance

    def options(self, switch_seconds: float) -> EngineOptions:
        """Returns what the engine is given."""
        return EngineOptions(
            lag=self.lag_steps,
            noise=self.step_noise,
            outlier_share=self.outlier_share,
            outlier_factor=self.outlier_factor,
            pace=self.pace,
            switch_seconds=switch_seconds,
            warm_factor=self.warm_factor,
            prefill=self.prefill,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            stale_after=self.stale_after,
            stale_steps=self.stale_steps,
            stale_acceptance=self.stale_acceptance,
        )


class ScenarioFile(Section):
    """Describes a scenario: exactly one of `phases` (a closed loop) and `arrivals` (an open one).

    name, group, description: for the report.  seeds: runs with different luck; all policies meet
    the same.  moving: whether the best arm changes while it runs.
    profile: null = the controller and the peers know no costs.
    repeat: how often the list of phases is run.  requests: different ones of each kind in a closed
    loop, at least; they are served in turn, again and again.
    sustained_tpot_p99_seconds: bound on the time per output token, 99th percentile, under which the
    load is searched that each policy sustains; null = no search.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S(.*\S)?$")]
    group: Annotated[str, Field(min_length=1, max_length=64)] = "given"
    description: Annotated[str, Field(max_length=1000)] = ""
    seeds: Annotated[Whole, Field(ge=1, le=1000)] = 2
    moving: bool = False
    engine: EngineSection = EngineSection()
    cost: CostSection
    profile: ProfileSection | None = ProfileSection()
    traffic: Annotated[dict[KindName, KindSection], Field(min_length=1, max_length=64)]
    phases: Annotated[tuple[PhaseSection, ...], Field(min_length=1)] | None = None
    repeat: Annotated[Whole, Field(ge=1, le=20_000)] = 1
    requests: Annotated[Whole, Field(ge=1, le=1_000_000)] = 256
    arrivals: ArrivalsSection | None = None
    sustained_tpot_p99_seconds: Annotated[Seconds, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_workload(self) -> Self:
        if (self.phases is None) == (self.arrivals is None):
            raise ValueError("either phases or arrivals is needed")
        if self.phases is None and self.repeat != 1:
            raise ValueError("repeat has no meaning beside arrivals; they have their own")
        return self

    def scenario(self, folder: Path | None = None, place: Place | None = None) -> Scenario:
        """Makes the scenario.

        folder: where relative files are, by default the current one.  place: where the fields come
        from, for errors.  Raises InvalidInputError, which names the field.
        """
        place = place or Place(self.name)
        folder = folder or Path()
        surface = self.cost.surface(self.engine.max_batch_size, folder, place)
        known = sources(self.traffic, folder, place)
        for name, source in known.items():
            _require_drafters(surface, source, place, "traffic", name)
        workload: ClosedSource | OpenSource
        if self.arrivals is None:
            assert self.phases is not None
            workload = closed_loop(
                self.phases, self.repeat, self.requests, self.traffic, known, surface, place
            )
        else:
            limit = surface.max_batch_size
            workload = open_loop(self.arrivals, self.traffic, known, limit, folder, place)
        return Scenario(
            self.name,
            self.group,
            self.description,
            surface,
            workload,
            None if self.profile is None else self.profile.measured(surface, place),
            surface.max_batch_size,
            self.moving,
            self.seeds,
            self.engine.options(self.cost.scale * self.cost.switch_seconds),
            self.sustained_tpot_p99_seconds,
        )


def _require_drafters(
    surface: CostSurface, source: AcceptanceSource, place: Place, *path: str
) -> None:
    missing = [d.name for d in surface.plain.drafters if d.name not in source.drafters]
    if missing:
        fault = f"has no acceptance for drafter {missing[0]!r}, only for {list(source.drafters)}"
        raise place.fault(path, fault)
