"""Implements `controller report`: a recorded window as one page for an incident."""

from pathlib import Path
from typing import Annotated

import typer

from controller.cli.output import FormOption, Output, print_error, print_line, show_one
from controller.cli.replay import Engine, RecordingPath
from controller.util.exit_codes import Exit


def report(
    recording: RecordingPath,
    file: Annotated[Path, typer.Option("--output", help="Where the page is written.")],
    engine: Engine = "",
    output: FormOption = Output.TABLE,
) -> None:
    """Turns a recording into one self-contained HTML file.

    Exit codes: 0 written, 2 bad input.
    """
    from controller.core.errors import SpeculationError
    from controller.recording.incident_report import render_ticket
    from controller.recording.recording import find
    from controller.recording.replay import replay
    from controller.recording.window import Window
    from controller.util.files import write_whole

    try:
        window = Window()
        verdict = replay(find(recording, engine), [window])
        text = render_ticket(window, verdict)
    except SpeculationError as error:
        print_error(f"controller report: {' '.join(str(error).splitlines())}")
        raise typer.Exit(Exit.USAGE) from error
    try:
        write_whole(file, text.encode("utf-8", "replace"))
    except OSError as error:
        print_error(f"controller report: {file} cannot be written: {error.strerror}")
        raise typer.Exit(Exit.USAGE) from error
    steps, plans = len(window.steps), window.plan_count
    show_one(
        "IncidentReport",
        {"path": file, "engine_id": verdict.engine_id, "steps": steps, "plans": plans},
        output,
        [str(file)],
        lambda: print_line(f"{file}: {steps} steps, {plans} plans"),
    )
