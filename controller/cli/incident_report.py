"""Implements `controller report`: a recorded window as one page for an incident."""

from pathlib import Path
from typing import Annotated

import typer

from controller.cli.output import FORM_HELP, Output, print_error, print_line, show_one
from controller.cli.replay import Engine, RecordingPath
from controller.util.exit_codes import Exit


def report(
    recording: RecordingPath,
    file: Annotated[
        Path | None, typer.Option("--output", help="Where the page is written.")
    ] = None,
    engine: Engine = "",
    output: Annotated[str, typer.Option("-o", help=FORM_HELP)] = Output.TABLE.value,
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

    path, form = _target(file, output)
    try:
        window = Window()
        verdict = replay(find(recording, engine), [window])
        text = render_ticket(window, verdict)
    except SpeculationError as error:
        print_error(f"controller report: {' '.join(str(error).splitlines())}")
        raise typer.Exit(Exit.USAGE) from error
    try:
        write_whole(path, text.encode("utf-8", "replace"))
    except OSError as error:
        print_error(f"controller report: {path} cannot be written: {error.strerror}")
        raise typer.Exit(Exit.USAGE) from error
    steps, plans = len(window.steps), window.plan_count
    show_one(
        "IncidentReport",
        {"path": path, "engine_id": verdict.engine_id, "steps": steps, "plans": plans},
        form,
        [str(path)],
        lambda: print_line(f"{path}: {steps} steps, {plans} plans"),
    )


def _target(file: Path | None, output: str) -> tuple[Path, Output]:
    """(where the page is written, how to print).  `-o FILE` is what `--output FILE` is now."""
    if output in set(Output):
        if file is None:
            raise typer.BadParameter("--output FILE is needed: where the page is written")
        return file, Output(output)
    if file is not None:
        raise typer.BadParameter(f"-o {output}: one of {', '.join(Output)} is needed")
    print_error("controller report: -o FILE will be gone, write --output FILE")
    return Path(output), Output.TABLE
