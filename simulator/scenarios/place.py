"""Names the place in a scenario file that an error is about: file, line and path of the field."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from controller.core.errors import SpeculationError
from simulator.errors import InvalidInputError

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Tells where the fields of a scenario file are.

    source: the file, or the scenario's name if it was not read from one.  lines: line of the key of
    each field, or of each list item, counted from 1.
    """

    source: str | Path
    lines: Mapping[FieldPath, int] = field(default_factory=dict)

    def fault(self, path: FieldPath, text: str) -> InvalidInputError:
        """Returns the error about a field, at its line or that of the nearest section around it."""
        near = path
        while near and near not in self.lines:
            near = near[:-1]
        where = dotted(path)
        return InvalidInputError(
            self.source, self.lines.get(near, 0), f"{where}: {text}" if where else text
        )

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Any error of the simulator's inputs within becomes one about this field."""
        try:
            yield
        except SpeculationError as error:
            raise self.fault(path, " ".join(str(error).split())) from error


def dotted(path: FieldPath) -> str:
    """Formats the path of a field, such as phases[2].batch."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
