"""Formats a profile for people: the table of step times, and what it was measured on."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.engine_spec import Arm
from controller.util.text import TextColumn, TextTable, spread_priorities


def profile_tables(profile: Profile) -> Iterator[TextTable]:
    """Yields a table for each drafter: rows gamma, columns B.

    A cell has the milliseconds of a step, and the ratio to gamma = 0 of the same drafter.
    """
    sizes = sorted({cell.batch_size for cell in profile.cells})
    cells = {(cell.arm, cell.batch_size): cell for cell in profile.cells}
    for drafter in dict.fromkeys(cell.drafter for cell in profile.cells):
        gammas = sorted({c.gamma for c in profile.cells if c.drafter == drafter})
        yield _gamma_table(
            f"{drafter}: milliseconds per step, and ratio to gamma = 0",
            sizes,
            {
                (gamma, size): _cell_text(cells, Arm(drafter, gamma), size)
                for gamma in gammas
                for size in sizes
            },
        )


def _gamma_table(
    title: str, sizes: Sequence[int], cells: Mapping[tuple[int, int], str]
) -> TextTable:
    """Makes a table with a row for each gamma.  cells: texts by gamma and batch size."""
    priorities = spread_priorities(len(sizes))
    columns = [
        TextColumn("gamma", is_right_aligned=True),
        *(
            TextColumn(f"B = {size}", is_right_aligned=True, priority=priority)
            for size, priority in zip(sizes, priorities, strict=True)
        ),
    ]
    rows = [
        (str(gamma), *(cells.get((gamma, size), "") for size in sizes))
        for gamma in sorted({gamma for gamma, _ in cells})
    ]
    return TextTable(title, columns, rows)


def _cell_text(cells: dict[tuple[Arm, int], ProfileCell], arm: Arm, size: int) -> str:
    cell = cells.get((arm, size))
    if cell is None:
        return "-"
    text = f"{cell.step_seconds * 1e3:.2f}"
    plain_cell = cells.get((Arm(arm.drafter, 0), size))
    return f"{text} {cell.step_seconds / plain_cell.step_seconds:.2f}x" if plain_cell else text


def measured_text(profile: Profile) -> str:
    """Returns three lines about how and on what a profile was measured."""
    spreads = sorted(cell.spread_seconds / cell.step_seconds for cell in profile.cells)
    steps = sorted(cell.steps for cell in profile.cells)
    middle = len(steps) // 2
    return (
        f"at {profile.kv_tokens_per_sequence:.0f} tokens of context; each further token adds "
        f"{profile.seconds_per_kv_token * 1e6:.3f} us per step\n"
        f"steps per cell: {steps[0]} to {steps[-1]}, median {steps[middle]}; interquartile range "
        f"{spreads[middle]:.1%} of the median typically, {spreads[-1]:.1%} at most\n"
        f"{profile.hardware}"
    )


@dataclass(frozen=True, slots=True)
class CellDifference:
    """A cell in two profiles.

    ratio: seconds in the second profile over those in the first; None if only one has measured it.
    apart: they differ by more than the sum of both spreads (interquartile ranges).
    """

    drafter: str
    gamma: int
    batch_size: int
    ratio: float | None
    apart: bool


def cell_differences(first_profile: Profile, second_profile: Profile) -> list[CellDifference]:
    """Compares every cell that either profile has, by drafter, gamma and batch size."""
    first_cells = {(cell.arm, cell.batch_size): cell for cell in first_profile.cells}
    second_cells = {(cell.arm, cell.batch_size): cell for cell in second_profile.cells}

    def compare_cell(arm: Arm, size: int) -> CellDifference:
        first, second = first_cells.get((arm, size)), second_cells.get((arm, size))
        if first is None or second is None:
            return CellDifference(arm.drafter, arm.gamma, size, None, apart=False)
        distance_seconds = abs(first.step_seconds - second.step_seconds)
        return CellDifference(
            arm.drafter, arm.gamma, size, second.step_seconds / first.step_seconds,
            apart=distance_seconds > first.spread_seconds + second.spread_seconds,
        )  # fmt: skip

    keys = sorted(
        first_cells.keys() | second_cells.keys(),
        key=lambda key: (key[0].drafter, key[0].gamma, key[1]),
    )
    return [compare_cell(arm, size) for arm, size in keys]


def difference_tables(differences: Sequence[CellDifference]) -> Iterator[TextTable]:
    """Yields a table for each drafter: rows gamma, columns B."""
    sizes = sorted({difference.batch_size for difference in differences})
    for drafter in dict.fromkeys(difference.drafter for difference in differences):
        yield _gamma_table(
            f"{drafter}: second / first",
            sizes,
            {
                (difference.gamma, difference.batch_size): _ratio_text(difference)
                for difference in differences
                if difference.drafter == drafter
            },
        )


def _ratio_text(difference: CellDifference) -> str:
    return (
        "-"
        if difference.ratio is None
        else f"{difference.ratio:.3f}{'!' if difference.apart else ''}"
    )


def hardware_note(device: str) -> str:
    """Describes the engine's device, and the machine that measured."""
    host = f"{_processor()}, {os.cpu_count()} processors, {_memory_gib():.0f} GiB"
    return f"device: {device or 'unknown'}; measured from a host with {host}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30
