"""Reads the policy file: draft lengths and bounds that apply until the file changes.

    policies:
      - name: chat                          # policy:chat in every list
        model: org/model                    # or engine: ID, or fleet: true
        reason: measured in May
        schedule:                           # a fixed draft length for ranges of batch sizes
          - {batch: 1-8, gamma: 5}
          - {batch: 9-32, gamma: 3, drafter: eagle3}
      - name: bounds
        fleet: true
        reason: longer drafts run out of memory
        at_most: 5                          # also: at_least, gamma, drafter, batch

Every entry becomes one override, and a schedule one for each of its ranges.  Operators' overrides
take precedence over them (`controller.core.planning.overrides`).  `policies: []` is an empty
policy.  A file without that key is refused, because it may be incomplete.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self, TypeAlias

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA
from controller.core.errors import SpeculationError
from controller.core.planning.overrides import (
    InvalidOverrideError,
    Override,
    Rule,
    Scope,
    ScopeKind,
)
from controller.util.files import UnreadableFileError, read_small
from controller.util.strict_yaml import (
    StrictLoader,
    StrictYamlError,
    decode_utf8,
    load_mapping,
    yaml_error,
)
from controller.wire.override_text import parse_batch_range

POLICY_PREFIX: Final = "policy:"
MAX_BYTES: Final = 64 * 1024
# Most overrides of a file: every plan applies all of them.
_MAX_OVERRIDES: Final = 64
_AUTHOR: Final = "policy file"
_TEXT: Final = "tag:yaml.org,2002:str"
_Location: TypeAlias = tuple[str | int, ...]


class PolicyFileError(SpeculationError):
    """A policy file that cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy in force and the state of its file.

    path: None if the sidecar has no policy file.  overrides: in force.  read_at: Unix seconds at
    which they were read.  error: why the present file cannot be used; "" if it can.
    """

    path: Path | None = None
    overrides: tuple[Override, ...] = ()
    read_at: float = 0.0
    error: str = ""


def read_policy(path: Path) -> tuple[tuple[Override, ...], str]:
    """Returns the overrides that a file defines, in its order, and its text.

    Raises PolicyFileError.
    """
    try:
        content = read_small(path, MAX_BYTES)
    except UnreadableFileError as error:
        raise PolicyFileError(f"{path}: {error}") from error
    return parse_policy(path, content), content.decode()


def parse_policy(path: Path, content: bytes) -> tuple[Override, ...]:
    """Returns the overrides that the content of a file defines, in its order.

    path: for messages.  Raises PolicyFileError.
    """
    try:
        content_and_lines = load_mapping(decode_utf8(content), _Loader, _line_numbers)
    except StrictYamlError as error:
        raise PolicyFileError(error.located_text(path)) from error
    if content_and_lines is None:
        raise PolicyFileError(
            f"{path}: the file is empty or has only comments, and may be incomplete; write "
            "`policies: []` for an empty policy"
        )
    values, lines = content_and_lines
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        raise PolicyFileError(_errors_text(path, lines, error)) from error
    overrides: list[Override] = []
    for index, entry in enumerate(file.policies):
        try:
            overrides += entry.overrides(len(overrides) + 1)
        except InvalidOverrideError as error:
            location = _location_text(path, lines, ("policies", index))
            raise PolicyFileError(f"{location}: {entry.name}: {error}") from error
    if len(overrides) > _MAX_OVERRIDES:
        raise PolicyFileError(
            f"{path}: {len(overrides)} entries, at most {_MAX_OVERRIDES} are allowed"
        )
    return tuple(overrides)


def _parse_batch(value: object) -> tuple[int, int]:
    # `batch: 8` is a number in YAML.
    low, high = parse_batch_range(str(value))
    if max(low, high) > MAX_BATCH_SIZE or 0 < high < low or low < 1:
        raise ValueError(f"batch {value}: must be ascending sizes from 1 to {MAX_BATCH_SIZE}")
    return low, high


_Gamma: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_GAMMA)]
_Batch: TypeAlias = Annotated[tuple[int, int], BeforeValidator(_parse_batch)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _ScheduleStep(_Model):
    """One range of a schedule."""

    batch: _Batch
    gamma: _Gamma
    drafter: str | None = None


class _Entry(_Model):
    """One entry of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    reason: str
    engine: str | None = None
    model: str | None = None
    fleet: Annotated[bool, Field(strict=True)] = False
    gamma: _Gamma | None = None
    at_least: _Gamma | None = None
    at_most: _Gamma | None = None
    drafter: str | None = None
    batch: _Batch | None = None
    schedule: tuple[_ScheduleStep, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [self.engine is not None, self.model is not None, self.fleet].count(True) != 1:
            raise ValueError(f"{self.name}: set exactly one of engine, model and fleet: true")
        single = (self.gamma, self.at_least, self.at_most, self.drafter, self.batch)
        if self.schedule and any(value is not None for value in single):
            raise ValueError(
                f"{self.name}: an entry with a schedule cannot have gamma, at_least, at_most, "
                "drafter or batch; put them into another entry"
            )
        end = 0
        for step in self.schedule:
            low, high = step.batch
            if low <= end:
                raise ValueError(
                    f"{self.name}: the ranges of a schedule must ascend and not overlap; {low} "
                    f"follows {end}"
                )
            end = high or MAX_BATCH_SIZE
        return self

    @property
    def scope(self) -> Scope:
        """Returns the engines that the entry applies to.  Raises InvalidOverrideError."""
        if self.engine is not None:
            return Scope(ScopeKind.ENGINE, self.engine)
        if self.model is not None:
            return Scope(ScopeKind.MODEL, self.model)
        return Scope(ScopeKind.FLEET)

    def overrides(self, revision: int) -> Iterator[Override]:
        """Yields the overrides, numbered from a revision.  Raises InvalidOverrideError."""
        name = f"{POLICY_PREFIX}{self.name}"
        for number, step in enumerate(self.schedule):
            rule = Rule(gamma=step.gamma, drafter=step.drafter)
            yield self._override(f"{name}:{step.batch[0]}", rule, step.batch, revision + number)
        if not self.schedule:
            rule = Rule(
                gamma=self.gamma, gamma_min=self.at_least, gamma_max=self.at_most,
                drafter=self.drafter,
            )  # fmt: skip
            yield self._override(name, rule, self.batch or (0, 0), revision)

    def _override(self, name: str, rule: Rule, batch: tuple[int, int], revision: int) -> Override:
        return Override(
            name, self.scope, rule, _AUTHOR, self.reason, *batch, revision, from_file=True
        )


class _File(_Model):
    policies: tuple[_Entry, ...]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [entry.name for entry in self.policies]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"{duplicate}: this name is used twice; names must be unique")
        return self


class _Loader(StrictLoader):
    # The document, the entries, an entry, its schedule, a range of it, and a value.
    depth_max: ClassVar[int] = 6
    too_deep: ClassVar[str] = "an entry has plain values and at most a schedule"


def _line_numbers(root: yaml.Node, location: _Location = ()) -> dict[_Location, int]:
    """Returns the line of every node, by its place.  Raises MarkedYAMLError for a repeated key."""
    lines = {location: root.start_mark.line + 1}
    if isinstance(root, yaml.SequenceNode):
        for index, item in enumerate(root.value):
            lines |= _line_numbers(item, (*location, index))
    elif isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.tag != _TEXT:  # for example `off` and `<<`
                name = key.value if isinstance(key, yaml.ScalarNode) else "this"
                raise yaml_error(key, f"{name} is not a key of the policy file")
            child_location = (*location, key.value)
            if child_location in lines:
                raise yaml_error(key, f"{key.value} is set twice; remove one")
            lines |= _line_numbers(value, child_location) | {
                child_location: key.start_mark.line + 1
            }
    return lines


def _errors_text(path: Path, lines: Mapping[_Location, int], error: ValidationError) -> str:
    """Describes every error with its line, but without the values."""
    return "; ".join(
        f"{_location_text(path, lines, item['loc'])}: {_error_text(item)}"
        for item in error.errors(include_url=False, include_input=False)
    )


def _error_text(item: ErrorDetails) -> str:
    if item["type"] == "extra_forbidden":
        return _unknown_key_text(item["loc"])
    if item["type"] == "tuple_type":
        return f"{item['loc'][-1]}: must be a list, with a dash before each item"
    text = item["msg"].removeprefix("Value error, ")
    names = [str(part) for part in item["loc"] if isinstance(part, str)]
    return f"{names[-1]}: {text}" if names and item["type"] != "value_error" else text


def _unknown_key_text(location: _Location) -> str:
    model = (
        _File if len(location) == 1 else _ScheduleStep if "schedule" in location[:-1] else _Entry
    )
    name, field_names = str(location[-1]), [*model.model_fields]
    close_matches = difflib.get_close_matches(name.replace("-", "_"), field_names, 1)
    hint = (
        f"did you mean {close_matches[0]}?"
        if close_matches
        else f"known keys: {', '.join(field_names)}"
    )
    return f"{name} is not a key of the policy file: {hint}"


def _location_text(path: Path, lines: Mapping[_Location, int], location: _Location) -> str:
    """Names the file and the line of a node, or of the nearest enclosing node with a line."""
    while location and location not in lines:
        location = location[:-1]
    return f"{path}, line {lines.get(location, 1)}"
