"""Reads YAML that people write by hand, strictly: no anchors, no tags, bounded in size and depth.

`yaml.safe_load` keeps no line numbers, takes the last of two equal keys, expands aliases without a
bound, and quotes values, which may be secrets, in its errors.
"""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

_NULL = "tag:yaml.org,2002:null"

_T = TypeVar("_T")


class StrictYamlError(Exception):
    """A file that is not such YAML.  line: counted from 1, or 0 if the whole file is at fault."""

    def __init__(self, line: int, problem: str) -> None:
        self.line = line
        super().__init__(problem)


class StrictLoader(yaml.SafeLoader):
    """A safe loader without YAML's features that only an attack would use in such a file.

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
            raise fault(event, "anchors and aliases are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise fault(event, "tags are not supported; write the plain value")
        self._depth += 1
        if self._depth > self.depth_max:
            raise fault(event, f"nested too deeply; {self.too_deep}")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def read_text(path: Path, bytes_max: int) -> str:
    """Reads a regular UTF-8 file of at most `bytes_max` bytes, or raises StrictYamlError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StrictYamlError(0, "not a regular file")
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise StrictYamlError(0, error.strerror or "cannot be read") from error
    except ValueError as error:
        raise StrictYamlError(0, "is not a file name") from error
    if len(content) > bytes_max:
        raise StrictYamlError(0, f"the file is larger than {bytes_max // 1024} KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictYamlError(0, "not UTF-8 text; save it as UTF-8") from error


def load_mapping(
    text: str, kind: type[StrictLoader], lines: Callable[[yaml.MappingNode], _T]
) -> tuple[dict[Any, Any], _T] | None:
    """Returns the mapping that the text is, and what `lines` makes of its nodes; None if empty.

    `lines` may raise `fault` as well.  Raises StrictYamlError.
    """
    try:
        loader = kind(text)
        try:
            root = loader.get_single_node()
            if root is None or root.tag == _NULL:
                return None
            if not isinstance(root, yaml.MappingNode):
                raise fault(root, "the file is not a mapping; write `key: value` lines")
            found = lines(root)
            return loader.construct_document(root), found
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise StrictYamlError(mark.line + 1 if mark else 0, said) from error
    except yaml.YAMLError as error:
        raise StrictYamlError(0, "the file is not YAML text") from error
    except ValueError as error:  # the date 2026-99-99, say
        raise StrictYamlError(0, "a value cannot be read; put it into quotes") from error


def fault(where: Any, problem: str) -> yaml.MarkedYAMLError:
    """Returns the error for a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)
