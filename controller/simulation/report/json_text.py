"""A report as JSON and back: the fields of `results`, enums by value, finite numbers only."""

import json
import math
from typing import Any

from pydantic import TypeAdapter, ValidationError

from controller.simulation.errors import InvalidInputError
from controller.simulation.results import SimulationReport

_ADAPTER: TypeAdapter[SimulationReport] = TypeAdapter(SimulationReport)


def to_json(report: SimulationReport) -> str:
    """Writes a report as JSON, with its fields as they are named in `results`."""
    return json.dumps(_finite(_ADAPTER.dump_python(report, mode="json")), indent=1) + "\n"


def from_json(text: str) -> SimulationReport:
    """Raises InvalidInputError for anything that `to_json` does not write."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError("report", 0, f"{where or 'text'}: {first['msg']}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
