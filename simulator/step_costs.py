"""Measured step costs in files: a public CSV format, and the profile format of this project.

The CSV has one measured cell per line:

    batch_size,num_draft_tokens,step_seconds

`num_draft_tokens` is the width that the target verifies, gamma + 1, so that 1 is plain decoding:
the convention of inference-lab and of the step-cost tables for SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA
from controller.core.errors import InvalidProfileError
from controller.core.step_report import MAX_STEP_SECONDS
from simulator.errors import InvalidInputError
from simulator.text_files import csv_rows, text_lines

COLUMNS = ("batch_size", "num_draft_tokens", "step_seconds")
_MAX_PROFILE_CHARACTERS = 64 << 20
# The error quotes the input, which may be the whole file.
_MAX_FAULT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class CostTable:
    """A full grid of one drafter's steps.

    batch_sizes, gammas: ascending; gammas begin with 0.  seconds: [gammas, batch sizes].
    """

    batch_sizes: tuple[int, ...]
    gammas: tuple[int, ...]
    seconds: NDArray[np.float64]

    def cells(self, drafter: str) -> tuple[ProfileCell, ...]:
        """Returns the cells of a profile.

        A table has neither a spread nor a number of steps: they are set to 0 and 1.
        """
        return tuple(
            ProfileCell(drafter, gamma, size, float(self.seconds[i, j]), 0.0, 1)
            for i, gamma in enumerate(self.gammas)
            for j, size in enumerate(self.batch_sizes)
        )


def read_step_costs(path: str | Path) -> CostTable:
    """Reads the CSV above, with its lines in any order.

    Raises InvalidInputError with the line: a wrong header, a blank, an invalid number, a repeated
    cell, and a batch size (at its first line) without plain decoding or without a width that other
    batch sizes have; and for a file without a row.
    """
    seconds: dict[tuple[int, int], float] = {}
    lines: dict[tuple[int, int], int] = {}
    for row in csv_rows(Path(path), COLUMNS, allow_other_columns=False):
        size = row.integer("batch_size", 1, MAX_BATCH_SIZE)
        width = row.integer("num_draft_tokens", 1, MAX_GAMMA + 1)
        cell = (size, width - 1)
        if cell in seconds:
            fault = f"batch size {size} at width {width} is in line {lines[cell]} already"
            raise row.make_error(fault)
        seconds[cell] = row.number("step_seconds")
        lines[cell] = row.line
        if not 0 < seconds[cell] <= MAX_STEP_SECONDS:
            raise row.make_error(
                f"step_seconds {seconds[cell]:g} must be above 0 and at most {MAX_STEP_SECONDS:g}"
            )
    return _make_table(path, seconds, lines)


def write_step_costs(table: CostTable) -> str:
    """Returns the text of the CSV; reading it gives the same numbers."""
    rows = (
        f"{size},{gamma + 1},{float(table.seconds[i, j])!r}\n"
        for j, size in enumerate(table.batch_sizes)
        for i, gamma in enumerate(table.gammas)
    )
    return ",".join(COLUMNS) + "\n" + "".join(rows)


def read_profile(path: str | Path) -> Profile:
    """Reads a profile of this project.  Raises InvalidInputError."""
    lines = []
    characters_left = _MAX_PROFILE_CHARACTERS
    for number, line in text_lines(Path(path), _MAX_PROFILE_CHARACTERS):
        characters_left -= len(line) + 1
        if characters_left < 0:
            raise InvalidInputError(path, number, "the file is too large for a profile")
        lines.append(line)
    try:
        return Profile.from_json("\n".join(lines))
    except InvalidProfileError as error:
        fault = f"is not a profile: {error}"
        raise InvalidInputError(path, 0, fault[:_MAX_FAULT_CHARACTERS]) from error


def profile_table(profile: Profile, drafter: str, source: str | Path = "profile") -> CostTable:
    """Returns the table of a drafter's cells.

    Plain decoding runs the target alone.  If it was measured only with another drafter (`controller
    profile` measures it once), the cells of that drafter are used.

    Raises InvalidInputError, which names `source`: no cell of the drafter, a missing cell of plain
    decoding or of a draft length that other batch sizes have, or a number outside the limits of an
    engine.
    """
    drafter_cells = [cell for cell in profile.cells if cell.drafter == drafter]
    sizes = {cell.batch_size for cell in drafter_cells}
    plain = [cell for cell in profile.cells if cell.gamma == 0 and cell.batch_size in sizes]
    seconds: dict[tuple[int, int], float] = {}
    # The drafter's own cells come last and take precedence.
    for cell in [*plain, *drafter_cells]:
        limits = (MAX_GAMMA, MAX_BATCH_SIZE, MAX_STEP_SECONDS)
        values = (cell.gamma, cell.batch_size, cell.step_seconds)
        if any(value > limit for value, limit in zip(values, limits, strict=True)):
            fault = (
                f"drafter {drafter!r}, gamma {cell.gamma}, batch size {cell.batch_size}, "
                f"{cell.step_seconds:g} s: gamma goes up to {MAX_GAMMA}, the batch size to "
                f"{MAX_BATCH_SIZE}, a step to {MAX_STEP_SECONDS:g} s"
            )
            raise InvalidInputError(source, 0, fault)
        seconds[cell.batch_size, cell.gamma] = cell.step_seconds
    if not seconds:
        measured_drafters = sorted({cell.drafter for cell in profile.cells})
        raise InvalidInputError(
            source, 0, f"drafter {drafter!r} was not measured, {measured_drafters} were"
        )
    return _make_table(source, seconds, {})


def _make_table(
    source: str | Path,
    seconds: Mapping[tuple[int, int], float],
    lines: Mapping[tuple[int, int], int],
) -> CostTable:
    """Makes a full table from (batch size, gamma) -> seconds.  lines: line of each cell."""
    sizes = sorted({size for size, _ in seconds})
    gammas = sorted({gamma for _, gamma in seconds} | {0})
    for size in sizes:
        for gamma in gammas:
            if (size, gamma) not in seconds:
                first_line = min((line for (b, _), line in lines.items() if b == size), default=0)
                detail = "plain decoding" if gamma == 0 else "other batch sizes have it"
                fault = f"batch size {size} lacks num_draft_tokens {gamma + 1} ({detail})"
                raise InvalidInputError(source, first_line, fault)
    table = [[seconds[size, gamma] for size in sizes] for gamma in gammas]
    return CostTable(tuple(sizes), tuple(gammas), np.array(table, dtype=np.float64))
