"""Reads a scenario file: YAML text into a checked `ScenarioFile`, with the place of every field."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from controller.util.strict_yaml import (
    StrictLoader,
    StrictYamlError,
    fault,
    load_mapping,
    read_text,
)
from simulator.errors import InvalidInputError
from simulator.reading import shown
from simulator.scenario import Scenario
from simulator.scenarios.place import FieldPath, Place
from simulator.scenarios.scenario_file import ScenarioFile

_MAX_BYTES = 1024 * 1024
_MAX_KEY = 128


class _Loader(StrictLoader):
    depth_max: ClassVar[int] = 12
    too_deep: ClassVar[str] = "no field of a scenario is that deep"


# YAML 1.1 takes 1e-6 and 1.5e3 for texts, because a point or a sign is missing.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_scenario_file(path: Path) -> tuple[ScenarioFile, Place]:
    """Reads and checks a file.

    Raises InvalidInputError, which names the file, the line and the field.
    """
    try:
        text = read_text(path, _MAX_BYTES)
        found = load_mapping(text, _Loader, _lines)
    except StrictYamlError as error:
        raise InvalidInputError(path, error.line, str(error)) from error
    values, lines = found or ({}, {})
    place = Place(path, lines)
    return parse_scenario(values, place), place


def load_scenario(path: Path) -> Scenario:
    """Makes the scenario of a file.  Raises InvalidInputError, which names file and field."""
    file, place = read_scenario_file(path)
    return file.scenario(path.parent, place)


def parse_scenario(values: Mapping[str, Any], place: Place) -> ScenarioFile:
    """Checks values as they are in a file.  Raises InvalidInputError about the first bad field."""
    try:
        return ScenarioFile.model_validate(values)
    except ValidationError as error:
        raise _first_fault(error.errors(include_url=False), place) from error


def _first_fault(errors: list[ErrorDetails], place: Place) -> InvalidInputError:
    # An unknown field is likely the cause of the one that is missing.
    first = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    path = tuple(part for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        return place.fault(path, "is not a field here; see docs/simulation.md for those there are")
    if first["type"] == "missing":
        return place.fault(path, "is missing")
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = first["input"]
    quoted = "" if isinstance(value, dict | list) else f", not {shown(value)}"
    return place.fault(path, f"{text}{quoted}")


def _lines(root: yaml.MappingNode) -> dict[FieldPath, int]:
    """Returns the line of every key and list item.  Raises MarkedYAMLError for a repeated key."""
    lines: dict[FieldPath, int] = {}

    def walk(node: yaml.Node, path: FieldPath) -> None:
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                lines[*path, i] = item.start_mark.line + 1
                walk(item, (*path, i))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or not 1 <= len(key.value) <= _MAX_KEY:
                    raise fault(key, "this key is not a name; is there a space after its colon?")
                field = (*path, key.value)
                if field in lines:
                    raise fault(
                        key, f"{key.value} is set twice, first in line {lines[field]}; remove one"
                    )
                lines[field] = key.start_mark.line + 1
                walk(value, field)

    walk(root, ())
    return lines
