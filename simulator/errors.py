"""Errors of the simulator's inputs: one line with the file, the line and the fault."""

from pathlib import Path

from controller.core.errors import SpeculationError


class InvalidInputError(SpeculationError):
    """An invalid file or option of a simulation.  `line` counts from 1; 0 means no line."""

    def __init__(self, source: str | Path, line: int, fault: str) -> None:
        self.source = str(source)
        self.line = line
        self.fault = fault
        location = f"{source}:{line}" if line else f"{source}"
        super().__init__(f"{location}: {fault}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        """Supports pickling, so that a worker process can return the error."""
        return type(self), (self.source, self.line, self.fault)


def require_within(owner: object, low: float, high: float, *names: str) -> None:
    """Raises InvalidInputError for the first of these attributes outside [least, most]."""
    for name in names:
        value = getattr(owner, name)
        if not low <= value <= high:
            raise InvalidInputError(name, 0, f"{value} must be in [{low:g}, {high:g}]")
