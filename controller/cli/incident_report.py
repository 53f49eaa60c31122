"""Implements `controller report`: a recorded window as one page for an incident."""

from pathlib import Path
from typing import Annotated

import typer

from controller.cli.replay import EXIT_USAGE, Engine, RecordingPath


def report(
    recording: RecordingPath,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the page is written.")],
    engine: Engine = "",
) -> None:
    """Turns a recording into one self-contained HTML file.

    Exit codes: 0 written, 2 bad input.
    """
    from controller.core.errors import SpeculationError
    from controller.recording.incident_report import render_ticket
    from controller.recording.recording import find
    from controller.recording.replay import replay
    from controller.recording.window import Window
    from controller.util.atomic_file import write_whole

    try:
        window = Window()
        verdict = replay(find(recording, engine), [window])
        text = render_ticket(window, verdict)
    except SpeculationError as error:
        typer.echo(f"controller report: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    try:
        write_whole(output, text.encode("utf-8", "replace"))
    except OSError as error:
        typer.echo(f"controller report: {output} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    print(f"{output}: {len(window.steps)} steps, {window.plan_count} plans")
