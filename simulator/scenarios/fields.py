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

    def the_one_of(self, *names: str) -> str:
        """Returns the one of these fields that is set.  Raises ValueError unless exactly one is."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) == 1:
            return given[0]
        if len(names) == 2:
            raise ValueError(f"either {' or '.join(names)} is needed")
        found = " and ".join(given) or "nothing"
        raise ValueError(f"one of {', '.join(names)} is needed; there is {found}")

    def refuse_beside(self, other: str, *names: str) -> None:
        """Raises ValueError for the first of these fields that differs from its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{name} has no meaning beside {other}")


def _number(value: Any) -> Any:
    # Pydantic would accept true and "1" as numbers.
    if isinstance(value, bool | str):
        raise PydanticCustomError("number", "a number is needed")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]

Seconds = Annotated[Number, Field(ge=0, le=MAX_STEP_SECONDS)]
Share = Annotated[Number, Field(ge=0, le=1)]
Factor = Annotated[Number, Field(ge=0.01, le=100)]
# Standard deviation of a logarithm.
LogSpread = Annotated[Number, Field(ge=0, lt=2)]
BatchSize = Annotated[Whole, Field(ge=1, le=MAX_BATCH_SIZE)]
Gamma = Annotated[Whole, Field(ge=0, le=MAX_GAMMA)]
MeanLength = Annotated[Number, Field(ge=1, le=1e7)]
SeedNumber = Annotated[Whole, Field(ge=0, lt=2**63)]
DrafterName = Annotated[str, Field(min_length=1, max_length=64)]
KindName = Annotated[str, Field(min_length=1, max_length=64)]
FileName = Annotated[str, Field(min_length=1, max_length=4096)]
# Keys are texts or numbers in YAML; a draft length or a batch size may be either.
GammaKey = Annotated[int, Field(ge=0, le=MAX_GAMMA)]
BatchSizeKey = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]


FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Locations of the fields of a scenario file.

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
        """Converts errors of the simulator's inputs inside the block to errors about this field."""
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
