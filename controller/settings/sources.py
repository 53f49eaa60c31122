"""Reads and merges the sources of settings: flags over the environment over the file.

Values are nested as the settings are; a key is dotted, for example `planner.probe_share`.

The file is read strictly, because people write it by hand.  It is plain YAML: one mapping with one
level of groups, no anchors, no tags, no duplicate keys.  An error names the file, the line and the
key, and never quotes a value, which may be a secret.  pydantic-settings' YamlConfigSettingsSource
would only replace the call of `yaml.safe_load`.
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
    load_mapping,
    read_text,
    yaml_error,
)

PREFIX = "CONTROLLER_"
# Flags that are not named like their setting.
_FLAGS = {"profiles": "--profile"}
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


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """The source of one setting's value.

    kind: "flag", "environment", "file" or "default".  name: the flag, variable, or file and line.
    """

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class Sources:
    """The values that each source gives.  environment: by setting, not by variable."""

    flags: Mapping[str, Any]
    environment: Mapping[str, Any]
    file: SettingsFile | None

    def merged(self) -> dict[str, Any]:
        """Returns all values in one mapping; groups are merged key by key."""
        return _merge_groups(
            _merge_groups(self.file.values if self.file else {}, self.environment), self.flags
        )

    def origin(self, key: str) -> SettingOrigin:
        """Returns the source of a setting's value."""
        path = key.split(".")
        if _has_path(self.flags, path):
            return SettingOrigin("flag", _FLAGS.get(key, f"--{key.replace('_', '-')}"))
        if _has_path(self.environment, path):
            return SettingOrigin("environment", variable_name(key))
        if self.file is not None and key in self.file.lines:
            return SettingOrigin("file", f"{self.file.path}, line {self.file.lines[key]}")
        return SettingOrigin("default")


def variable_name(key: str) -> str:
    """Returns the environment variable of a dotted key."""
    return f"{PREFIX}{key.replace('.', '__')}".upper()


def _merge_groups(base: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overriding.items():
        base_value = merged.get(name)
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            value = {**base_value, **value}  # noqa: PLW2901  # the merged one
        merged[name] = value
    return merged


def _has_path(values: Mapping[str, Any], path: list[str]) -> bool:
    value: Any = values
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True


def read_settings_file(path: Path) -> SettingsFile:
    """Reads a file; an empty one sets nothing.  Raises SettingsFileError if it cannot be used."""
    try:
        content_and_lines = load_mapping(read_text(path, _MAX_BYTES), _Loader, _line_numbers)
    except StrictYamlError as error:
        raise SettingsFileError(error.located_text(path)) from error
    return (
        SettingsFile(path, *content_and_lines) if content_and_lines else SettingsFile(path, {}, {})
    )


class _Loader(StrictLoader):
    # The document, its groups, their values (lists), and the items of the lists.
    depth_max: ClassVar[int] = 4
    too_deep: ClassVar[str] = "there is only one level of groups"


def _line_numbers(root: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    """Returns the line of every dotted key.  Raises MarkedYAMLError for a bad or repeated key."""
    lines: dict[str, int] = {}
    for key, value in root.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        letters = name.replace("_", "").replace("-", "").replace(".", "")
        if not (letters.isalnum() and letters.isascii() and len(name) <= _MAX_KEY):
            raise yaml_error(
                key, "this key is not the name of a setting; is there a space after its colon?"
            )
        dotted = f"{prefix}{name}"
        if dotted in lines:
            raise yaml_error(
                key, f"{dotted} is set twice, first in line {lines[dotted]}; remove one"
            )
        lines[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            lines |= _line_numbers(value, f"{dotted}.")
    return lines
