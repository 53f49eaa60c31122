"""A profile as people read it: the table of step times, and what it was measured on."""

import os
import platform
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.engine_spec import Arm


class ProfileTable:
    """Rows gamma, columns B: milliseconds, and the ratio to gamma = 0 of the same drafter."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Implements `rich`'s protocol."""
        profile = self._profile
        sizes = sorted({cell.batch_size for cell in profile.cells})
        cells = {(cell.arm, cell.batch_size): cell for cell in profile.cells}
        for drafter in dict.fromkeys(cell.drafter for cell in profile.cells):
            table = Table(
                title=f"{drafter}: milliseconds of a step, and its ratio to gamma = 0",
                title_justify="left",
            )
            table.add_column("gamma", justify="right")
            for size in sizes:
                table.add_column(f"B = {size}", justify="right")
            for gamma in sorted({c.gamma for c in profile.cells if c.drafter == drafter}):
                row = [_cell(cells, Arm(drafter, gamma), size) for size in sizes]
                table.add_row(str(gamma), *row)
            yield table
        yield Text(_footer(profile))


def _cell(cells: dict[tuple[Arm, int], ProfileCell], arm: Arm, size: int) -> str:
    cell = cells.get((arm, size))
    if cell is None:
        return "-"
    text = f"{cell.step_seconds * 1e3:.2f}"
    plain = cells.get((Arm(arm.drafter, 0), size))
    return f"{text}  {cell.step_seconds / plain.step_seconds:.2f}x" if plain else text


def _footer(profile: Profile) -> str:
    spreads = sorted(cell.spread_seconds / cell.step_seconds for cell in profile.cells)
    steps = sorted(cell.steps for cell in profile.cells)
    middle = len(steps) // 2
    return (
        f"at {profile.kv_tokens_per_sequence:.0f} tokens of context; every token more or less "
        f"{profile.seconds_per_kv_token * 1e6:.3f} us a step\n"
        f"steps in a cell: {steps[0]} to {steps[-1]}, mostly {steps[middle]}; interquartile range "
        f"mostly {spreads[middle]:.1%} of the median, {spreads[-1]:.1%} at worst\n"
        f"{profile.hardware}"
    )


class DifferenceTable:
    """Rows gamma, columns B: the second profile's seconds as a multiple of the first's.

    Marked where they lie further apart than both spreads together (interquartile ranges).
    """

    def __init__(self, one: Profile, other: Profile) -> None:
        self._one = {(cell.arm, cell.batch_size): cell for cell in one.cells}
        self._other = {(cell.arm, cell.batch_size): cell for cell in other.cells}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Implements `rich`'s protocol."""
        keys = self._one.keys() | self._other.keys()
        sizes = sorted({size for _, size in keys})
        for drafter in sorted({arm.drafter for arm, _ in keys}):
            table = Table(title=f"{drafter}: second / first", title_justify="left")
            table.add_column("gamma", justify="right")
            for size in sizes:
                table.add_column(f"B = {size}", justify="right")
            for gamma in sorted({arm.gamma for arm, _ in keys if arm.drafter == drafter}):
                arm = Arm(drafter, gamma)
                table.add_row(str(gamma), *(self._cell(arm, size) for size in sizes))
            yield table
        yield Text("! further apart than both spreads together; -: measured in one of them only")

    def _cell(self, arm: Arm, size: int) -> str:
        one, other = self._one.get((arm, size)), self._other.get((arm, size))
        if one is None or other is None:
            return "" if one is other else "-"
        apart = abs(one.step_seconds - other.step_seconds)
        mark = "!" if apart > one.spread_seconds + other.spread_seconds else ""
        return f"{other.step_seconds / one.step_seconds:.3f}{mark}"


def hardware_note(device: str) -> str:
    """The engine's device, and the machine that measured."""
    host = f"{_processor()}, {os.cpu_count()} processors, {_memory_gib():.0f} GiB"
    return f"device: {device or 'not said'}; measured from a host with {host}"


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
