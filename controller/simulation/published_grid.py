"""The published sweep of two drafters as its file has it: goodput by drafter, gamma, concurrency.

{"conc": [..], "drafters": {"mtp": {"nospec": {"goodput": [..]},
                                    "fixed": [{"gamma": 1, "goodput": [..]}, ..]}, ..}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from controller.simulation import published_qwen
from controller.simulation.errors import InvalidInputError

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Row(BaseModel):
    goodput: list[_Rate]


class _FixedRow(_Row):
    gamma: int


class _GridDrafter(BaseModel):
    nospec: _Row
    fixed: list[_FixedRow]


class _File(BaseModel):
    conc: list[int]
    drafters: dict[str, _GridDrafter]


def read_grid(path: Path) -> Mapping[str, NDArray[np.float64]]:
    """Drafter -> [gamma_max + 1, concurrencies], committed output tokens per second; row = gamma.

    Concurrencies are those of `published_qwen.CONCURRENCIES`.  Raises InvalidInputError for
    anything but a file of this very sweep.
    """
    try:
        file = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(path, 0, f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InvalidInputError(path, 0, f"{where}: {first['msg']}") from error
    if tuple(file.conc) != published_qwen.CONCURRENCIES:
        raise InvalidInputError(
            path, 0, f"conc: {list(published_qwen.CONCURRENCIES)} are needed, not {file.conc[:16]}"
        )
    if set(file.drafters) != set(published_qwen.DRAFTERS):
        raise InvalidInputError(
            path,
            0,
            f"drafters: {sorted(published_qwen.DRAFTERS)} are needed, not {sorted(file.drafters)}",
        )
    goodput = {}
    for name, drafter in file.drafters.items():
        found = [row.gamma for row in drafter.fixed]
        if found != list(range(1, published_qwen.GAMMA_MAX[name] + 1)):
            raise InvalidInputError(
                path,
                0,
                f"drafters.{name}.fixed: gamma 1 to {published_qwen.GAMMA_MAX[name]} are needed",
            )
        rows = [drafter.nospec.goodput, *(row.goodput for row in drafter.fixed)]
        if any(len(row) != len(file.conc) for row in rows):
            raise InvalidInputError(
                path, 0, f"drafters.{name}: {len(file.conc)} values of goodput a row are needed"
            )
        goodput[name] = np.array(rows)
    return goodput
