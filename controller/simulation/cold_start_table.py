"""The runs of `cold_start` as a table that says where a bar was missed."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from controller.simulation.cold_start import (
    CAUTIOUS_STEPS,
    SETTLED_FROM,
    WORTHWHILE_GAIN,
    ColdRun,
)

# Of plain decoding, and of the best arm where speculation is worthwhile.
OFF_BAR, SETTLED_BAR = 0.98, 0.95


def table(runs: Sequence[ColdRun]) -> Group:
    """One row a cell, the worst of its seeds; missed bars are marked."""
    found = Table(title="The first steps without a profile", title_justify="left")
    found.add_column("engine / traffic / batch size")
    for column in (
        "best arm over off",
        f"over off, first {CAUTIOUS_STEPS} steps",
        f"of the best arm, from step {SETTLED_FROM}",
    ):
        found.add_column(column, justify="right")
    cells: dict[str, list[ColdRun]] = {}
    for run in runs:
        cells.setdefault(run.cell.name, []).append(run)
    for name, seeds in cells.items():
        off, settled = min(run.off for run in seeds), min(run.settled for run in seeds)
        worthwhile = seeds[0].gain >= WORTHWHILE_GAIN
        found.add_row(
            name,
            f"{seeds[0].gain:.2f}",
            _marked(off, off < OFF_BAR),
            _marked(settled, worthwhile and settled < SETTLED_BAR),
        )
    behind = sum(run.off < OFF_BAR for run in runs)
    judged = [run for run in runs if run.gain >= WORTHWHILE_GAIN]
    late = sum(run.settled < SETTLED_BAR for run in judged)
    return Group(
        found,
        Text(
            f"Below {OFF_BAR} of off: {behind} of {len(runs)} runs, the worst "
            f"{min(run.off for run in runs):.3f}. Below {SETTLED_BAR} of the best arm where it "
            f"gains {WORTHWHILE_GAIN - 1:.0%} or more: {late} of {len(judged)} runs, the worst "
            f"{min((run.settled for run in judged), default=1.0):.3f}."
        ),
    )


def _marked(value: float, missed: bool) -> str:
    return f"[bold red]{value:.3f} ![/]" if missed else f"{value:.3f}"
