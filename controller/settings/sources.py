"""Merges the sources of settings: flags override the environment, which overrides the file.

Values are nested as the settings are; a key is dotted, for example `planner.probe_share`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.settings.yaml_file import SettingsFile

PREFIX = "CONTROLLER_"
# Flags whose name is not the setting's.
_FLAGS = {"profiles": "--profile"}


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
        return _over(_over(self.file.values if self.file else {}, self.environment), self.flags)

    def origin(self, key: str) -> SettingOrigin:
        """Returns the source of a setting's value."""
        path = key.split(".")
        if _has(self.flags, path):
            return SettingOrigin("flag", _FLAGS.get(key, f"--{key.replace('_', '-')}"))
        if _has(self.environment, path):
            return SettingOrigin("environment", variable(key))
        if self.file is not None and key in self.file.lines:
            return SettingOrigin("file", f"{self.file.path}, line {self.file.lines[key]}")
        return SettingOrigin("default")


def variable(key: str) -> str:
    """Returns the environment variable of a dotted key."""
    return f"{PREFIX}{key.replace('.', '__')}".upper()


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = {**under, **value}  # noqa: PLW2901  # the merged one
        merged[name] = value
    return merged


def _has(values: Mapping[str, Any], path: list[str]) -> bool:
    value: Any = values
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
