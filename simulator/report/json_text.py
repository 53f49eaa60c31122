"""A report as JSON and back: the fields of `results`, enums by value, finite numbers only."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from simulator.errors import InvalidInputError
from simulator.results import SimulationReport

_ADAPTER: TypeAdapter[SimulationReport] = TypeAdapter(SimulationReport)


def to_json(report: SimulationReport) -> str:
    """Writes a report as JSON, with its fields as they are named in `results`."""
    return _ADAPTER.dump_json(report, indent=1).decode() + "\n"


def to_values(report: SimulationReport) -> dict[str, Any]:
    """Returns what `to_json` writes as plain values."""
    found: dict[str, Any] = _ADAPTER.dump_python(report, mode="json")
    return found


def from_json(text: str) -> SimulationReport:
    """Reads a report.  Raises InvalidInputError for anything that `to_json` does not write."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError("report", 0, f"{where or 'text'}: {first['msg']}") from error
