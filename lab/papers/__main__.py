"""`python -m lab.papers`: published results, computed again beside what the papers state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from controller.core.errors import SpeculationError
from controller.util.exit_codes import Exit
from lab.papers import rows
from lab.papers.drafters import reproduce_drafters
from lab.papers.memory import compare
from lab.papers.reproductions import tables
from lab.papers.tide import reproduce_tide
from lab.papers.tts import reproduce_tts
from simulator.gpu_allocation import Demand, GpuPool, evaluate_allocation

# TIDE's mixed pools (arXiv 2602.05145, section 5.5 and appendix A.4).  Of Figures 10 and 12 only
# what the text states in numbers can be compared; the bars are drawn, not tabled.

# Inference and training rate of one card, over an MI250's (Figure 11, as the text gives them).
_RATES = {"H100": (6.76, 2.44), "MI300X": (4.42, 1.77), "MI250": (1.0, 1.0)}
app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False
)


@dataclass(frozen=True, slots=True)
class _StatedGain:
    """The gain that the paper states for a pool in which all of high serve and all of low train."""

    high: str
    high_cards: int
    low: str
    low_cards: int
    speedup: float
    relative: float


_STATED_GAINS = (
    _StatedGain("H100", 8, "MI250", 4, 1.15, 1.08),  # Figure 10, ShareGPT
    _StatedGain("H100", 8, "MI250", 4, 1.30, 1.22),  # Figure 10, Science
    _StatedGain("H100", 4, "MI250", 1, 1.30, 1.26),  # Figure 12
    _StatedGain("MI300X", 2, "MI250", 1, 1.10, 0.99),  # Figure 12
)


@contextmanager
def _exit_on_refusal(command: str) -> Iterator[None]:
    """Ends the command with one line for a file or an option that cannot be used."""
    try:
        yield
    except (SpeculationError, ValueError) as error:
        typer.echo(f"lab.papers {command}: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(Exit.USAGE) from error


def _print(renderable: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(renderable)


@app.command()
def tide() -> None:
    """Computes TIDE's Eq. 5 from its Table 5, and compares it with the speed-ups of its Table 4."""
    _print(tables(reproduce_tide()))


@app.command()
def drafters(
    grid: Annotated[Path | None, typer.Option(help="The published drafter grid, a file.")] = None,
) -> None:
    """Computes where MTP and DFlash cross over, by the roofline of the published pair."""
    with _exit_on_refusal("drafters"):
        _print(tables(reproduce_drafters(grid)))


@app.command()
def tts(
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Processes that run side by side; default: one a processor.")
    ] = None,
) -> None:
    """Plays the choice of the update stride on streams made of the paper's tables (six minutes)."""
    _print(tables(reproduce_tts(range(seed, seed + seeds), processes)))


@app.command("pools")
def pools_command() -> None:
    """Computes mixed GPU pools whose gain TIDE's text states (section 5.5 and appendix A.4)."""
    print("TIDE (arXiv 2602.05145), section 5.5 and appendix A.4: relative inference throughput\n")
    print(f"{'gpus':34}{'speedup':>9}{'here':>8}{'paper':>8}")
    for gain in _STATED_GAINS:
        gpus = f"{gain.high_cards} {gain.high} serve, {gain.low_cards} {gain.low} train"
        pools = [
            GpuPool(gain.high, gain.high_cards, *_RATES[gain.high]),
            GpuPool(gain.low, gain.low_cards, *_RATES[gain.low]),
        ]
        # Throughput over that of all GPUs serving without speculation.
        relative_throughput = evaluate_allocation(
            pools, Demand(gain.speedup), (0, gain.low_cards)
        ).relative_throughput
        print(f"{gpus:34}{gain.speedup:9.2f}{relative_throughput:8.3f}{gain.relative:8.2f}")


@app.command()
def memory(
    files: Annotated[list[Path], typer.Argument(help="SpecDecode-Bench files, JSON lines.")],
) -> None:
    """Fits the memory of the simulator's chains to recorded acceptance, and shows how close."""
    with _exit_on_refusal("memory"):
        for path in files:
            fits, drafter_correlation, comparisons = compare(path)
            print(f"{path.name}: correlation between drafters {drafter_correlation:.2f}")
            for f in fits:
                print(
                    f"  {f.drafter}: level_spread {f.level_spread:.2f}, passage_spread "
                    f"{f.passage_spread:.2f}, passage_tokens {f.passage_tokens:.1f}, "
                    f"mean run {f.run:.1f} tokens, consistent {f.consistent:.1%}\n"
                    f"    survival {', '.join(f'{s:.3f}' for s in f.survival)}"
                )
            for c in comparisons:
                print(
                    f"  {c.drafter}, gamma {c.gamma}: {c.recorded:.2f} tokens a step recorded, "
                    f"{c.chain:.2f} with memory, {c.independent:.2f} without"
                )


@app.command("rows")
def rows_command(
    files: Annotated[list[Path], typer.Argument(help="SpecDecode-Bench files, JSON lines.")],
    batch_sizes: Annotated[
        str, typer.Option(help="Sequences at a time, separated by commas.")
    ] = "1,8,32,64,128",
    steps: Annotated[int, typer.Option(help="Steps of a run, about.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the order of the requests and the noise.")] = 0,
    processes: Annotated[int | None, typer.Option(help="Side by side; all processors.")] = None,
    longest: Annotated[
        int, typer.Option(help="Leave out requests with more output tokens; 0: keep all.", min=0)
    ] = 0,
) -> None:
    """Runs the controller with a mixture of EAGLE and a lookup on recorded requests."""
    with _exit_on_refusal("rows"):
        sizes = [int(size) for size in batch_sizes.split(",")]
        _print(rows.table(rows.run_all(files, sizes, steps, seed, processes, longest)))


@app.command(name="row-rules")
def row_rules_command(
    files: Annotated[list[Path], typer.Argument(help="SpecDecode-Bench files, JSON lines.")],
    batch_sizes: Annotated[
        str, typer.Option(help="Sequences at a time, separated by commas.")
    ] = "1,32,64,128",
) -> None:
    """Compares rules that choose a drafter for each row, on recorded requests."""
    with _exit_on_refusal("row-rules"):
        _print(rows.compare(files, [int(size) for size in batch_sizes.split(",")]))


if __name__ == "__main__":
    app(prog_name="python -m lab.papers")
