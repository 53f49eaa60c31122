"""`python -m lab.papers`: published results, computed again beside what the papers state."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from controller.core.errors import SpeculationError
from controller.util.exit_codes import Exit
from lab.papers.drafters import reproduce_drafters
from lab.papers.gpu_pools import STATED, relative_throughput
from lab.papers.reproductions import tables
from lab.papers.tide import reproduce_tide
from lab.papers.tts import reproduce_tts

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False
)


def _show(found: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(found)


@app.command()
def tide() -> None:
    """Computes TIDE's practical-speedup curves from its Table 5."""
    _show(tables(reproduce_tide()))


@app.command()
def drafters(
    grid: Annotated[Path | None, typer.Option(help="The published drafter grid, a file.")] = None,
) -> None:
    """Computes where MTP and DFlash cross over, by the roofline of the published pair."""
    try:
        _show(tables(reproduce_drafters(grid)))
    except SpeculationError as error:
        typer.echo(f"lab.papers drafters: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(Exit.USAGE) from error


@app.command()
def tts(
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Processes that run side by side; default: one a processor.")
    ] = None,
) -> None:
    """Plays the choice of the update stride on Test-Time Speculation's tables (six minutes)."""
    _show(tables(reproduce_tts(range(seed, seed + seeds), processes)))


@app.command()
def pools() -> None:
    """Computes TIDE's mixed GPU pools (arXiv 2602.05145, section 5.5 and appendix A.4)."""
    print("TIDE (arXiv 2602.05145), section 5.5 and appendix A.4: relative inference throughput\n")
    print(f"{'gpus':34}{'speedup':>9}{'here':>8}{'paper':>8}")
    for one in STATED:
        here = relative_throughput(one)
        print(f"{one.gpus:34}{one.speedup:9.2f}{here:8.3f}{one.relative:8.2f}")


if __name__ == "__main__":
    app(prog_name="python -m lab.papers")
