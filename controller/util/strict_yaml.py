"""Reads YAML that people write by hand, strictly: no anchors, no tags, bounded in size and depth.

`yaml.safe_load` keeps no line numbers, takes the last of two equal keys, expands aliases without a
bound, quotes values, which may be secrets, in its errors, and raises more than YAMLError: for a
number that is too large, a date that does not exist, or an escape that is no character.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import yaml

from controller.util.files import UnreadableFileError, read_small

_NULL = "tag:yaml.org,2002:null"
_NUMBERS: Final = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
# Characters of a number.  A float has fewer significant digits, and 64 digits fit into a float in
# every base of YAML (60 is one of them).
_NUMBER_MAX: Final = 64

# Errors of Python's conversions that PyYAML's scanner and constructors let through.
_STRAY: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_UNREADABLE: Final = "a value cannot be read; put it into quotes"

_T = TypeVar("_T")


class StrictYamlError(Exception):
    """A file that is not strict YAML.  line: from 1; 0 if the error concerns the whole file."""

    def __init__(self, line: int, problem: str) -> None:
        self.line = line
        super().__init__(problem)

    def located_text(self, path: Path) -> str:
        """Returns the error text with the file's name and the line."""
        return f"{path}, line {self.line}: {self}" if self.line else f"{path}: {self}"


class StrictLoader(yaml.SafeLoader):
    """A safe loader without the YAML features that such a file does not need.

    depth_max: levels of nodes, the document included.  too_deep: the error for more of them.
    """

    depth_max: ClassVar[int]
    too_deep: ClassVar[str]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuses aliases, which can expand without bound, tags, and deep nesting."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml_error(event, "anchors and aliases are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise yaml_error(event, "tags are not supported; write the plain value")
        self._depth += 1
        if self._depth > self.depth_max:
            raise yaml_error(event, f"nested too deeply; {self.too_deep}")
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Makes the value of a node; the parameters are PyYAML's."""
        try:
            return super().construct_object(node, deep)
        except _STRAY as error:
            raise yaml_error(node, _UNREADABLE) from error


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Refuses what no reader of such a file can use.  Raises MarkedYAMLError."""
    text: str = node.value
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise yaml_error(node, "a text with a NUL character, or with half a surrogate pair")
    if node.tag in _NUMBERS and len(text) > _NUMBER_MAX:
        raise yaml_error(node, f"a number with more than {_NUMBER_MAX} characters")


def read_text(path: Path, bytes_max: int) -> str:
    """Reads a regular UTF-8 file of at most `bytes_max` bytes, or raises StrictYamlError."""
    try:
        return decode_utf8(read_small(path, bytes_max))
    except UnreadableFileError as error:
        raise StrictYamlError(0, str(error)) from error


def decode_utf8(content: bytes) -> str:
    """Returns the text of a file, or raises StrictYamlError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictYamlError(0, "is not UTF-8 text; save it as UTF-8") from error


def load_mapping(
    text: str, kind: type[StrictLoader], lines: Callable[[yaml.MappingNode], _T]
) -> tuple[dict[Any, Any], _T] | None:
    """Returns the text's mapping, and the result of `lines` for its nodes; None if it is empty.

    `lines` may raise `yaml_error` as well.  Raises StrictYamlError.
    """
    loader: StrictLoader | None = None
    try:
        loader = kind(text)
        root = loader.get_single_node()
        if root is None or root.tag == _NULL:
            return None
        if not isinstance(root, yaml.MappingNode):
            raise yaml_error(root, "the file is not a mapping; write `key: value` lines")
        node_lines = lines(root)
        return loader.construct_document(root), node_lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise StrictYamlError(mark.line + 1 if mark else 0, problem) from error
    except yaml.YAMLError as error:
        raise StrictYamlError(0, "the file is not YAML") from error
    except _STRAY as error:
        # The scanner is at the line of the value.
        raise StrictYamlError(0 if loader is None else loader.line + 1, _UNREADABLE) from error
    finally:
        if loader is not None:
            loader.dispose()


def yaml_error(node: Any, problem: str) -> yaml.MarkedYAMLError:
    """Returns the error for a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
