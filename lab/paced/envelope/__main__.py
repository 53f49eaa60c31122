"""The command line of the envelope."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.harness.errors import HarnessError
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal
from lab.paced.envelope.outcome import CONCURRENCIES, Point, from_json
from lab.paced.envelope.run import EnvelopeOptions, run
from lab.papers.drafters import read_grid
from simulator.errors import InvalidInputError

EXIT_FAILED = 1


def envelope(
    grid: Annotated[
        Path | None, typer.Option(help="The published sweep (drafterGrid.json), to draw beside.")
    ] = None,
    dilation: Annotated[
        float,
        typer.Option(
            min=1.0, help="Machine seconds a second of one sequence; larger batches less."
        ),
    ] = 40.0,
    concurrency: Annotated[
        str, typer.Option(help=f"Of {','.join(map(str, CONCURRENCIES))}; all of them by default.")
    ] = "",
    output: Annotated[Path, typer.Option(help="Where result, picture and logs go.")] = Path(
        "build/envelope"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the concurrencies that are in OUTPUT already.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short runs, late or not: does it work?")
    ] = False,
) -> None:
    """Runs the best MTP, the best DFlash, no speculation and steered at each concurrency."""
    end_on_sigterm()
    terminal = Terminal()
    try:
        options = EnvelopeOptions(
            concurrencies=_concurrencies(concurrency),
            dilation=dilation,
            grid=None if grid is None else read_grid(grid),
            output=output,
            resumed_points=_read_points(output, quick=quick) if resume else (),
            quick=quick,
        )
        run(options, terminal)
    except (HarnessError, InvalidInputError) as error:
        terminal.say(f"\nThe envelope failed: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    terminal.say(f"\n{output / 'result.json'}  {output / 'envelope.png'}  {output / 'logs'}/")


def _read_points(output: Path, *, quick: bool) -> tuple[Point, ...]:
    """Returns the points of an earlier run in that folder; empty if it has written none."""
    path = output / "result.json"
    if not path.exists():
        return ()
    try:
        document = json.loads(path.read_text())
        points = from_json(document["points"])
        is_same_mode = document["quick"] == quick
    except (KeyError, ValueError) as error:
        raise HarnessError(f"{path} is not the result of such a run: {error!r}") from error
    if not is_same_mode:
        raise HarnessError(f"{path} and this run differ in --quick; name another --output")
    return points


def _concurrencies(text: str) -> tuple[int, ...]:
    if not text:
        return CONCURRENCIES
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in map(str, CONCURRENCIES)]:
        published = ", ".join(map(str, CONCURRENCIES))
        raise typer.BadParameter(f"{', '.join(unknown)}: published are {published}")
    return tuple(sorted({int(part) for part in parts}))


if __name__ == "__main__":
    typer.run(envelope)
