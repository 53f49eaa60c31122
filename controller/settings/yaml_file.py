"""Reads the settings' YAML file strictly, because people write it by hand.

The file is plain YAML: one mapping with one level of groups, no anchors, no tags, no key twice.  An
error names the file, the line and the key, and never quotes a value, which may be a secret.
pydantic-settings' YamlConfigSettingsSource would save one line, its call of `yaml.safe_load`: that
keeps no line numbers, takes the last of two equal keys, and quotes tags and aliases in errors.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controller.core.errors import SpeculationError

_MAX_BYTES = 64 * 1024
# The document, its groups, their values (lists), and the items of these.
_MAX_DEPTH = 4
_MAX_KEY = 64
_NULL = "tag:yaml.org,2002:null"


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
    text = _text(path)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None or root.tag == _NULL:
                return SettingsFile(path, {}, {})
            if not isinstance(root, yaml.MappingNode):
                raise _fault(root, "the file is not a mapping; write `key: value` lines")
            lines = _lines(root)
            values = loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise SettingsFileError(f"{path}{where}: {said}") from error
    except yaml.YAMLError as error:
        raise SettingsFileError(f"{path}: the file is not YAML text") from error
    except ValueError as error:  # the date 2026-99-99, say
        raise SettingsFileError(f"{path}: a value cannot be read; put it into quotes") from error
    return SettingsFile(path, values, lines)


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsFileError(f"{path}: not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsFileError(f"{path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise SettingsFileError(f"{path}: the file is larger than {_MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsFileError(f"{path}: not UTF-8 text; save it as UTF-8") from error


class _Loader(yaml.SafeLoader):
    """A safe loader without YAML's features that only an attack would use in a settings file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuses aliases, which can expand without bound, tags, and deep nesting."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _fault(event, "anchors and aliases are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise _fault(event, "tags are not supported; write the plain value")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _fault(event, "nested too deeply; there is only one level of groups")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _lines(root: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    """Returns the line of every dotted key.  Raises MarkedYAMLError for a bad or repeated key."""
    lines: dict[str, int] = {}
    for key, value in root.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        plain = name.replace("_", "").replace("-", "").replace(".", "")
        if not (plain.isalnum() and plain.isascii() and len(name) <= _MAX_KEY):
            raise _fault(
                key, "this key is not the name of a setting; is there a space after its colon?"
            )
        dotted = f"{prefix}{name}"
        if dotted in lines:
            raise _fault(key, f"{dotted} is set twice, first in line {lines[dotted]}; remove one")
        lines[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            lines |= _lines(value, f"{dotted}.")
    return lines


def _fault(where: Any, problem: str) -> yaml.MarkedYAMLError:
    """Returns the error for a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)
