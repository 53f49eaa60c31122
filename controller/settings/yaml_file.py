"""Reads the settings' YAML file strictly, because people write it by hand.

The file is plain YAML: one mapping with one level of groups, no anchors, no tags, no key twice.  An
error names the file, the line and the key, and never quotes a value, which may be a secret.
pydantic-settings' YamlConfigSettingsSource would save one line, its call of `yaml.safe_load`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from controller.core.errors import SpeculationError
from controller.util.strict_yaml import (
    StrictLoader,
    StrictYamlError,
    fault,
    load_mapping,
    read_text,
)

_MAX_BYTES = 64 * 1024
_MAX_KEY = 64


class SettingsFileError(SpeculationError):
    """A settings file that cannot be used; the message names file, line and key."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The contents of a settings file.

    values: nested as in the file.  lines: the line of each dotted key, counted from 1.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]


def read_settings_file(path: Path) -> SettingsFile:
    """Reads a file; an empty one sets nothing.  Raises SettingsFileError if it cannot be used."""
    try:
        found = load_mapping(read_text(path, _MAX_BYTES), _Loader, _lines)
    except StrictYamlError as error:
        where = f", line {error.line}" if error.line else ""
        raise SettingsFileError(f"{path}{where}: {error}") from error
    return SettingsFile(path, *found) if found else SettingsFile(path, {}, {})


class _Loader(StrictLoader):
    # The document, its groups, their values (lists), and the items of these.
    depth_max: ClassVar[int] = 4
    too_deep: ClassVar[str] = "there is only one level of groups"


def _lines(root: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    """Returns the line of every dotted key.  Raises MarkedYAMLError for a bad or repeated key."""
    lines: dict[str, int] = {}
    for key, value in root.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        plain = name.replace("_", "").replace("-", "").replace(".", "")
        if not (plain.isalnum() and plain.isascii() and len(name) <= _MAX_KEY):
            raise fault(
                key, "this key is not the name of a setting; is there a space after its colon?"
            )
        dotted = f"{prefix}{name}"
        if dotted in lines:
            raise fault(key, f"{dotted} is set twice, first in line {lines[dotted]}; remove one")
        lines[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            lines |= _lines(value, f"{dotted}.")
    return lines
