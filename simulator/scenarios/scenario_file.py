"""Defines the schema of scenario files, reads them, and loads the standard suite.

YAML text is parsed to a checked `ScenarioFile` with the location of every field, and then made into
a `Scenario`.  The suite has published costs, drawn acceptance, and all known failure modes; each of
its scenarios is a short file in `standard_scenarios`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from controller.core.cost.profile import Profile
from controller.util.strict_yaml import (
    StrictLoader,
    StrictYamlError,
    load_mapping,
    read_text,
    yaml_error,
)
from simulator.engine import EngineOptions, Prefill
from simulator.errors import InvalidInputError
from simulator.scenarios import fields
from simulator.scenarios.cost import CostSection, ProfileSection
from simulator.scenarios.traffic import KindSection, make_sources
from simulator.scenarios.work import ArrivalsSection, PhaseSection, make_closed_loop, make_open_loop
from simulator.sources import ClosedSource, OpenSource
from simulator.surface import CostSurface
from simulator.text_files import quote_value
from simulator.workload import AcceptanceSource, Workload

_MAX_FILE_BYTES = 1024 * 1024
_MAX_KEY_CHARACTERS = 128
SUITE_FOLDER = Path(__file__).parent / "standard"
_NAME_PATTERN = re.compile(r"^name:(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario, which all policies run `seeds` times.

    workload: makes the workload of a seed; equal seeds make equal workloads.
    profile: given to the controller and to every peer that needs costs; None: no profile.
    max_batch_size: the engine's limit, which the plan's table reaches.
    shifting: the best arm changes while it runs.
    sustained_tpot_p99_seconds: bound on the 99th percentile of the time per output token, counted
    from a request's arrival, under which `comparison.sustained` searches the load that each policy
    sustains; None = no search.
    """

    name: str
    group: str
    description: str
    surface: CostSurface
    workload: Callable[[int], Workload]
    profile: Profile | None
    max_batch_size: int
    shifting: bool
    seeds: int = 2
    options: EngineOptions = field(default_factory=EngineOptions)
    sustained_tpot_p99_seconds: float | None = None


_DEFAULT_OPTIONS = EngineOptions()
_ABOVE_ONE = Annotated[fields.Number, Field(ge=1, le=10_000)]


class EngineSection(fields.Section):
    """Describes how the simulated engine behaves.

    max_batch_size: sequences at a time; by default the largest batch whose costs are known.
    lag_steps: steps by which telemetry and plan are late.
    step_noise: standard deviation of the logarithm of a step's seconds.  outlier_share of the steps
    take outlier_factor as long.  pace: standard deviation of the logarithm of the machine's pace,
    which stays for some fifty steps.
    prefill: "none" (disaggregated) or "chunked", with prefill_chunk_tokens a pass.
    warm_factor: a step at gamma = 0 costs this much when a drafter stays awake.
    stale_steps: for this many steps after a sleep longer than stale_after steps, drafts are
    accepted with stale_acceptance times their usual probability.
    """

    max_batch_size: fields.BatchSize | None = None
    lag_steps: Annotated[fields.Integer, Field(ge=0, le=64)] = _DEFAULT_OPTIONS.lag
    step_noise: fields.LogSpread = _DEFAULT_OPTIONS.noise
    outlier_share: Annotated[fields.Share, Field(lt=1)] = _DEFAULT_OPTIONS.outlier_share
    outlier_factor: _ABOVE_ONE = _DEFAULT_OPTIONS.outlier_factor
    pace: fields.LogSpread = _DEFAULT_OPTIONS.pace
    prefill: Prefill = _DEFAULT_OPTIONS.prefill
    prefill_chunk_tokens: Annotated[fields.Integer, Field(ge=1, le=10_000_000)] = (
        _DEFAULT_OPTIONS.prefill_chunk_tokens
    )
    warm_factor: _ABOVE_ONE = _DEFAULT_OPTIONS.warm_factor
    stale_after: Annotated[fields.Integer, Field(ge=0, le=1_000_000)] = _DEFAULT_OPTIONS.stale_after
    stale_steps: Annotated[fields.Integer, Field(ge=0, le=1_000_000)] = _DEFAULT_OPTIONS.stale_steps
    stale_acceptance: fields.Share = _DEFAULT_OPTIONS.stale_acceptance

    def options(self, switch_seconds: float) -> EngineOptions:
        """Returns the options of the simulated engine."""
        unchanged = self.model_dump(exclude={"max_batch_size", "lag_steps", "step_noise"})
        return EngineOptions(
            lag=self.lag_steps, noise=self.step_noise, switch_seconds=switch_seconds, **unchanged
        )


class ScenarioFile(fields.Section):
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
    seeds: Annotated[fields.Integer, Field(ge=1, le=1000)] = 2
    moving: bool = False
    engine: EngineSection = EngineSection()
    cost: CostSection
    profile: ProfileSection | None = ProfileSection()
    traffic: Annotated[dict[fields.KindName, KindSection], Field(min_length=1, max_length=64)]
    phases: Annotated[tuple[PhaseSection, ...], Field(min_length=1)] | None = None
    repeat: Annotated[fields.Integer, Field(ge=1, le=20_000)] = 1
    requests: Annotated[fields.Integer, Field(ge=1, le=1_000_000)] = 256
    arrivals: ArrivalsSection | None = None
    sustained_tpot_p99_seconds: Annotated[fields.Seconds, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_workload(self) -> Self:
        if self.require_exactly_one("phases", "arrivals") == "arrivals":
            self.refuse_combination("arrivals; they have their own", "repeat")
        return self

    def make_scenario(
        self, folder: Path | None = None, locations: fields.FieldLocations | None = None
    ) -> Scenario:
        """Makes the scenario.

        folder: where relative files are, by default the current one.  locations: where the fields
        come from, for errors.  Raises InvalidInputError, which names the field.
        """
        locations = locations or fields.FieldLocations(self.name)
        folder = folder or Path()
        surface = self.cost.make_surface(self.engine.max_batch_size, folder, locations)
        sources_by_kind = make_sources(self.traffic, folder, locations)
        for name, source in sources_by_kind.items():
            _require_drafters(surface, source, locations, "traffic", name)
        workload: ClosedSource | OpenSource
        if self.arrivals is None:
            assert self.phases is not None
            workload = make_closed_loop(
                self.phases,
                self.repeat,
                self.requests,
                self.traffic,
                sources_by_kind,
                surface,
                locations,
            )
        else:
            limit = surface.max_batch_size
            workload = make_open_loop(
                self.arrivals, self.traffic, sources_by_kind, limit, folder, locations
            )
        return Scenario(
            self.name,
            self.group,
            self.description,
            surface,
            workload,
            None if self.profile is None else self.profile.make_profile(surface, locations),
            surface.max_batch_size,
            self.moving,
            self.seeds,
            self.engine.options(self.cost.scale * self.cost.switch_seconds),
            self.sustained_tpot_p99_seconds,
        )


def _require_drafters(
    surface: CostSurface, source: AcceptanceSource, locations: fields.FieldLocations, *path: str
) -> None:
    missing = [d.name for d in surface.without_mixtures.drafters if d.name not in source.drafters]
    if missing:
        fault = f"has no acceptance for drafter {missing[0]!r}, only for {list(source.drafters)}"
        raise locations.make_error(path, fault)


class _ScenarioLoader(StrictLoader):
    depth_max: ClassVar[int] = 12
    too_deep: ClassVar[str] = "no field of a scenario is that deep"


# YAML 1.1 reads 1e-6 and 1.5e3 as texts, because a point or a sign is missing.
_ScenarioLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_scenario_file(path: Path) -> tuple[ScenarioFile, fields.FieldLocations]:
    """Reads and checks a file.

    Raises InvalidInputError, which names the file, the line and the field.
    """
    try:
        text = read_text(path, _MAX_FILE_BYTES)
        mapping = load_mapping(text, _ScenarioLoader, _key_lines)
    except StrictYamlError as error:
        raise InvalidInputError(path, error.line, str(error)) from error
    values, lines = mapping or ({}, {})
    locations = fields.FieldLocations(path, lines)
    return parse_scenario(values, locations), locations


def load_scenario(path: Path) -> Scenario:
    """Makes the scenario of a file.  Raises InvalidInputError, which names file and field."""
    file, locations = read_scenario_file(path)
    return file.make_scenario(path.parent, locations)


def parse_scenario(values: Mapping[str, Any], locations: fields.FieldLocations) -> ScenarioFile:
    """Checks values as they are in a file.  Raises InvalidInputError about the first bad field."""
    try:
        return ScenarioFile.model_validate(values)
    except ValidationError as error:
        raise _first_error(error.errors(include_url=False), locations) from error


def _first_error(errors: list[ErrorDetails], locations: fields.FieldLocations) -> InvalidInputError:
    # An unknown field is the likely cause of a missing one.
    first = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    path = tuple(part for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        return locations.make_error(
            path, "is not a field here; see docs/simulation.md for those there are"
        )
    if first["type"] == "missing":
        return locations.make_error(path, "is missing")
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = first["input"]
    quoted = "" if isinstance(value, dict | list) else f", not {quote_value(value)}"
    return locations.make_error(path, f"{text}{quoted}")


def _key_lines(root: yaml.MappingNode) -> dict[fields.FieldPath, int]:
    """Returns the line of every key and list item.  Raises MarkedYAMLError for a repeated key."""
    lines: dict[fields.FieldPath, int] = {}

    def walk(node: yaml.Node, path: fields.FieldPath) -> None:
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                lines[*path, i] = item.start_mark.line + 1
                walk(item, (*path, i))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if (
                    not isinstance(key, yaml.ScalarNode)
                    or not 1 <= len(key.value) <= _MAX_KEY_CHARACTERS
                ):
                    raise yaml_error(
                        key, "this key is not a name; is there a space after its colon?"
                    )
                field = (*path, key.value)
                if field in lines:
                    raise yaml_error(
                        key, f"{key.value} is set twice, first in line {lines[field]}; remove one"
                    )
                lines[field] = key.start_mark.line + 1
                walk(value, field)

    walk(root, ())
    return lines


def standard_scenarios(part: str = "") -> list[Scenario]:
    """Loads the scenarios whose name contains `part`, in the order of the report."""
    return [load_scenario(path) for name, path in _suite_files().items() if part in name]


def scenario_text(name: str) -> str:
    """Returns the file of a scenario.  Raises InvalidInputError, which lists the names."""
    path = _suite_files().get(name)
    if path is None:
        fault = f"{name!r} is not in the suite; there are: {', '.join(_suite_files())}"
        raise InvalidInputError("--dump-scenario", 0, fault)
    return path.read_text(encoding="utf-8")


@cache
def _suite_files() -> dict[str, Path]:
    """Returns name -> file.  Only the line with the name is parsed, because most are not used."""
    file_by_name: dict[str, Path] = {}
    for path in sorted(SUITE_FOLDER.rglob("*.yaml"), key=_numeric_sort_key):
        match = _NAME_PATTERN.search(path.read_text(encoding="utf-8"))
        assert match is not None, f"{path} has no name"
        file_by_name[str(yaml.safe_load(match[1]))] = path
    return file_by_name


def _numeric_sort_key(path: Path) -> list[tuple[int, str]]:
    """Sorts numbers in file names by their value."""
    parts = re.split(r"(\d+)", str(path.relative_to(SUITE_FOLDER).with_suffix("")))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
