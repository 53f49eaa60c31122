"""Common parts of scenario sections: strict models, bounded numbers, locations of fields."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA
from controller.core.errors import SpeculationError
from controller.core.step_report import MAX_STEP_SECONDS
from simulator.errors import InvalidInputError


class Section(BaseModel):
    """A section of a scenario file.  Unknown fields, NaN and infinite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def require_exactly_one(self, *names: str) -> str:
        """Returns the one of these fields that is set.  Raises ValueError unless exactly one is."""
        set_fields = [name for name in names if getattr(self, name) is not None]
        if len(set_fields) == 1:
            return set_fields[0]
        if len(names) == 2:
            raise ValueError(f"either {' or '.join(names)} is needed")
        given_text = " and ".join(set_fields) or "nothing"
        raise ValueError(f"one of {', '.join(names)} is needed; there is {given_text}")

    def refuse_combination(self, other_field: str, *names: str) -> None:
        """Raises ValueError for the first of these fields that differs from its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name} has no meaning beside {other_field}")


def _require_number(value: Any) -> Any:
    # Pydantic would accept true and "1" as numbers.
    if isinstance(value, bool | str):
        raise PydanticCustomError("number", "a number is needed")
    return value


Number = Annotated[float, BeforeValidator(_require_number)]
Integer = Annotated[int, BeforeValidator(_require_number)]

Seconds = Annotated[Number, Field(ge=0, le=MAX_STEP_SECONDS)]
Share = Annotated[Number, Field(ge=0, le=1)]
Factor = Annotated[Number, Field(ge=0.01, le=100)]
# Standard deviation of a logarithm.
LogSpread = Annotated[Number, Field(ge=0, lt=2)]
BatchSize = Annotated[Integer, Field(ge=1, le=MAX_BATCH_SIZE)]
Gamma = Annotated[Integer, Field(ge=0, le=MAX_GAMMA)]
MeanLength = Annotated[Number, Field(ge=1, le=1e7)]
SeedNumber = Annotated[Integer, Field(ge=0, lt=2**63)]
DrafterName = Annotated[str, Field(min_length=1, max_length=64)]
KindName = Annotated[str, Field(min_length=1, max_length=64)]
FileName = Annotated[str, Field(min_length=1, max_length=4096)]
# Keys are texts or numbers in YAML; a draft length or a batch size may be either.
GammaKey = Annotated[int, Field(ge=0, le=MAX_GAMMA)]
BatchSizeKey = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]


FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class FieldLocations:
    """Locations of the fields of a scenario file.

    source: the file, or the scenario's name if it was not read from one.  lines: line of the key of
    each field, or of each list item, counted from 1.
    """

    source: str | Path
    lines: Mapping[FieldPath, int] = field(default_factory=dict)

    def make_error(self, path: FieldPath, text: str) -> InvalidInputError:
        """Returns the error about a field, at its line or that of the nearest section around it."""
        nearest_path = path
        while nearest_path and nearest_path not in self.lines:
            nearest_path = nearest_path[:-1]
        dotted_path = format_path(path)
        return InvalidInputError(
            self.source,
            self.lines.get(nearest_path, 0),
            f"{dotted_path}: {text}" if dotted_path else text,
        )

    @contextmanager
    def errors_at(self, *path: str | int) -> Iterator[None]:
        """Converts errors of the simulator's inputs inside the block to errors about this field."""
        try:
            yield
        except SpeculationError as error:
            raise self.make_error(path, " ".join(str(error).split())) from error


def format_path(path: FieldPath) -> str:
    """Formats the path of a field, such as phases[2].batch."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
