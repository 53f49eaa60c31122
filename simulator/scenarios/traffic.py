"""Defines the section `traffic`: named kinds of requests, and which drafts they accept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from controller.core.engine_spec import MAX_GAMMA
from simulator.acceptance_trace import AcceptanceTrace
from simulator.copying import CopyingSource
from simulator.correlated_curves import AcceptanceMemory, CorrelatedCurves
from simulator.curves import IndependentCurves, conditional_curve, geometric_curve
from simulator.scenarios import fields
from simulator.sources import KindMixture, MeanTokens
from simulator.workload import AcceptanceSource

_Curve = Annotated[tuple[fields.Share, ...], Field(min_length=1, max_length=MAX_GAMMA)]
_Weight = Annotated[fields.Number, Field(gt=0, le=1e6)]
# Of curves; traces have their own lengths.
_OUTPUT_MEAN, _CONTEXT_MEAN = 256.0, 384.0


class DrafterMemorySection(fields.Section):
    """The correlation of neighbouring tokens and requests; see `chain.Memory`."""

    level_spread: fields.Number = AcceptanceMemory().level_spread
    drift_spread: fields.Number = AcceptanceMemory().drift_spread
    drift_requests: fields.Number = AcceptanceMemory().drift_requests
    passage_spread: fields.Number = AcceptanceMemory().passage_spread
    passage_tokens: fields.Number = AcceptanceMemory().passage_tokens

    def memory(self) -> AcceptanceMemory:
        """Returns the memory.  Raises InvalidInputError for values out of range."""
        return AcceptanceMemory(**self.model_dump(include=set(DrafterMemorySection.model_fields)))


class MemorySection(DrafterMemorySection):
    """Describes the memory of all drafters.

    by_drafter: drafter -> what differs for it.  correlation: between drafters, of all that is
    drawn for a token and a request.
    """

    by_drafter: dict[fields.DrafterName, DrafterMemorySection] = Field(default_factory=dict)
    correlation: fields.Number = 0.25

    def drafter_memory(self, drafter: str) -> AcceptanceMemory:
        """Returns the memory of a drafter.  Raises InvalidInputError for values out of range."""
        override = self.by_drafter.get(drafter)
        changes = {} if override is None else override.model_dump(exclude_unset=True)
        return self.model_copy(update=changes).memory()


class TraceSection(fields.Section):
    """Names files of recorded acceptance: exactly one of `requests` and `rounds`.

    requests: SpecDecode-Bench files.  rounds: drafter -> CSV of rounds.  Both are relative to the
    scenario file.  labelled: requests carry the stem of their file, or the category of their
    rounds, as class label.
    """

    requests: Annotated[tuple[fields.FileName, ...], Field(min_length=1)] | None = None
    rounds: Annotated[dict[fields.DrafterName, fields.FileName], Field(min_length=1)] | None = None
    labelled: bool = False

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        self.require_exactly_one("requests", "rounds")
        return self

    def source(self, folder: Path) -> AcceptanceTrace:
        """Reads the files."""
        if self.requests is not None:
            files = [folder / name for name in self.requests]
            return AcceptanceTrace.load(files, labelled=self.labelled)
        rounds = {drafter: folder / name for drafter, name in (self.rounds or {}).items()}
        return AcceptanceTrace.load_rounds(rounds, labelled=self.labelled)


class CopyingSection(fields.Section):
    """Describes requests that copy from their prompt; see `copying.CopyingSource`."""

    model: fields.DrafterName = CopyingSource("").model
    lookup: fields.DrafterName = CopyingSource("").lookup
    copied: fields.Number = CopyingSource("").copied
    copied_spread: fields.Number = CopyingSource("").copied_spread
    copied_tokens: fields.Number = CopyingSource("").copied_tokens
    faithful: fields.Number = CopyingSource("").faithful
    easy: fields.Number = CopyingSource("").easy
    easy_copied: fields.Number = CopyingSource("").easy_copied
    easy_spread: fields.Number = CopyingSource("").easy_spread
    chance: fields.Number = CopyingSource("").chance
    chance_accepted: fields.Number = CopyingSource("").chance_accepted


class KindSection(fields.Section):
    """A kind of requests: exactly one of a curve (in three notations), copying, a trace and a mix.

    geometric: drafter -> acceptance at every position.  positions: drafter -> conditional
    acceptance a_1, a_2, ...; deeper positions have the last value.  survival: drafter -> P(the
    first k drafts are accepted), k = 1, 2, ...; deeper positions are never accepted.
    memory: draws the curve with memory; without it every step is independent of the others.
    copying: requests that copy from their prompt, for a model and a lookup.
    trace: recorded requests.  mix: other kinds -> weight, drawn for each request; labelled: the
    requests carry the name of their kind as class label.
    output_tokens_mean, context_tokens_mean: lengths, lognormal around these means (sigma 0.5), at
    least 8; by default 256 and 384 for a curve, the recorded ones for a trace, and those of each
    kind for a mix.
    """

    geometric: Annotated[dict[fields.DrafterName, fields.Share], Field(min_length=1)] | None = None
    positions: Annotated[dict[fields.DrafterName, _Curve], Field(min_length=1)] | None = None
    survival: Annotated[dict[fields.DrafterName, _Curve], Field(min_length=1)] | None = None
    memory: MemorySection | None = None
    copying: CopyingSection | None = None
    trace: TraceSection | None = None
    mix: Annotated[dict[fields.KindName, _Weight], Field(min_length=1)] | None = None
    labelled: bool = False
    output_tokens_mean: fields.MeanLength | None = None
    context_tokens_mean: fields.MeanLength | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        source = self.require_exactly_one(
            "geometric", "positions", "survival", "copying", "trace", "mix"
        )
        if source in {"copying", "trace", "mix"}:
            self.refuse_combination(source, "memory")
        if source != "mix":
            self.refuse_combination(source, "labelled")
        return self

    @property
    def mean_tokens(self) -> MeanTokens:
        """Returns the mean lengths of its requests."""
        output, context = self.output_tokens_mean, self.context_tokens_mean
        if self.trace is None and self.mix is None:
            output = _OUTPUT_MEAN if output is None else output
            context = _CONTEXT_MEAN if context is None else context
        return MeanTokens(output, context)

    def curves(self, locations: fields.FieldLocations, name: str) -> dict[str, list[float]]:
        """Returns drafter -> conditional acceptance, up to the longest possible draft."""
        if self.geometric is not None:
            return {drafter: geometric_curve(a) for drafter, a in self.geometric.items()}
        if self.positions is not None:
            return {
                drafter: [*curve, *[curve[-1]] * (MAX_GAMMA - len(curve))]
                for drafter, curve in self.positions.items()
            }
        curve_by_drafter = {}
        for drafter, curve in (self.survival or {}).items():
            with locations.errors_at("traffic", name, "survival", drafter):
                curve_by_drafter[drafter] = conditional_curve(curve)
        return curve_by_drafter

    def source(self, name: str, folder: Path, locations: fields.FieldLocations) -> AcceptanceSource:
        """Makes the source of a kind that is not a mix.  Raises InvalidInputError."""
        if self.trace is not None:
            with locations.errors_at("traffic", name, "trace"):
                return self.trace.source(folder)
        curves, mean = self.curves(locations, name), self.mean_tokens
        assert mean.output is not None
        assert mean.context is not None
        if self.copying is not None:
            with locations.errors_at("traffic", name, "copying"):
                return CopyingSource(
                    name,
                    **self.copying.model_dump(),
                    output_tokens_mean=mean.output,
                    context_tokens_mean=mean.context,
                )
        if self.memory is None:
            return IndependentCurves(name, curves, mean.output, mean.context)
        with locations.errors_at("traffic", name, "memory"):
            memory = {drafter: self.memory.drafter_memory(drafter) for drafter in curves}
            return CorrelatedCurves(
                name, curves, memory, self.memory.correlation, mean.output, mean.context
            )


def make_sources(
    kinds: Mapping[str, KindSection], folder: Path, locations: fields.FieldLocations
) -> dict[str, AcceptanceSource]:
    """Returns kind -> its source; mixes are made of the others.  Raises InvalidInputError."""
    plain_sources = {
        name: kind.source(name, folder, locations)
        for name, kind in kinds.items()
        if kind.mix is None
    }
    mixes = {}
    for name, kind in kinds.items():
        if kind.mix is None:
            continue
        for part in kind.mix:
            if part not in plain_sources:
                known_kinds = ", ".join(plain_sources) or "others"
                fault = f"there is no kind {part!r}; a mix is made of {known_kinds}"
                raise locations.make_error(("traffic", name, "mix", part), fault)
        parts = tuple(plain_sources[part] for part in kind.mix)
        mixes[name] = KindMixture(name, parts, tuple(kind.mix.values()), kind.labelled)
    return {name: plain_sources.get(name) or mixes[name] for name in kinds}
