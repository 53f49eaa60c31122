"""The command line of the edits."""

from pathlib import Path
from typing import Annotated

import typer

from lab.harness.errors import HarnessError
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal
from lab.paced.edits.run import GAMMAS, EditsOptions, run
from lab.paced.plays import LATE_SHARE_MAX

EXIT_FAILED = 1


def edits(
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Edits at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Edits in a play.")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="How often steered is played.")] = 3,
    dilation: Annotated[
        float | None, typer.Option(min=1.0, help="Machine seconds a second; found by default.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two draft lengths, one repeat, any late pass: does it work?"),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where result and logs go.")] = Path("build/edits"),
) -> None:
    """Plays code edits on the real SGLang at an H100's pace: each drafter, and one for each row."""
    end_on_sigterm()
    terminal = Terminal()
    gammas = (3, 7) if quick else tuple(gamma for gamma in GAMMAS if gamma)
    options = EditsOptions(
        concurrency,
        requests,
        1 if quick else repeats,
        gammas,
        dilation,
        output,
        1.0 if quick else LATE_SHARE_MAX,
    )
    try:
        run(options, terminal)
    except HarnessError as error:
        terminal.say(f"\nThe edits failed: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    terminal.say(f"\n{output / 'result.json'}  {output / 'logs'}/")


if __name__ == "__main__":
    typer.run(edits)
