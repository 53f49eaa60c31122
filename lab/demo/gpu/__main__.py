"""The command line of the day at a GPU's own pace."""

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from lab.demo.gpu.plan import SETTINGS, Piece, total
from lab.demo.gpu.run import BudgetReachedError, GpuDemoOptions, plan, run
from lab.gpu_check.shapes import (
    EMULATED,
    QWEN3_8B,
    SMALL,
    Device,
    OnCpu,
    OnEmulatedCuda,
    SglangOptions,
)
from lab.harness.errors import HarnessError
from lab.harness.measured import gpus
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal

EXIT_USAGE = 2  # an unknown shape, too few minutes, or no GPU
# More would not make the table of an emulated device any better.
EMULATED_PROFILE_SECONDS = 15.0
EXIT_CUT_OFF = 4  # the minutes were over; what there is has been written


def demo(
    options: SglangOptions = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="Budget of the whole run.")
    ] = 9.0,
    profile_seconds: Annotated[
        float, typer.Option(min=1, help="Budget for measuring the step costs.")
    ] = 45.0,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Shape of the models: {', '.join(SETTINGS)}. By default {QWEN3_8B.name}, "
            f"and {SMALL.name} with --cpu."
        ),
    ] = None,
    cpu: OnCpu = False,
    emulated: OnEmulatedCuda = False,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Print what would run and how long it would take.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for page, result and logs.")] = Path(
        "build/demo-gpu"
    ),
) -> None:
    """Plays the day of the demo on a GPU: off, best static γ, SGLang's adaptive mode, steered."""
    terminal = Terminal()
    device = Device.EMULATED if emulated else Device.CPU if cpu else Device.GPU
    name = shape or (SMALL.name if cpu else QWEN3_8B.name)
    if emulated:
        name, profile_seconds = EMULATED.name, min(profile_seconds, EMULATED_PROFILE_SECONDS)
    if name not in SETTINGS:
        terminal.say(f"--shape {name!r} is unknown: choose one of {', '.join(SETTINGS)}")
        raise typer.Exit(EXIT_USAGE)
    run_options = GpuDemoOptions(
        SETTINGS[name], 60.0 * minutes, profile_seconds, output, device, tuple(options or ())
    )
    try:
        share, planned = plan(run_options)
    except HarnessError as error:
        terminal.say(f"--minutes: {error}")
        raise typer.Exit(EXIT_USAGE) from error
    if plan_only:
        _show_plan(share, planned, terminal)
        return
    if device is Device.GPU and not gpus():
        terminal.say(
            "No GPU was found (nvidia-smi lists none).  On a machine without one, `--plan` prints "
            "what would run, and `--cpu` or `--emulated` tries the run out on the processor."
        )
        raise typer.Exit(EXIT_USAGE)
    end_on_sigterm()
    signal.signal(signal.SIGALRM, end_of_time)
    signal.setitimer(signal.ITIMER_REAL, run_options.seconds)
    try:
        with terminal.exit_on_error("The demo failed"):
            run(run_options, terminal)
    except (KeyboardInterrupt, SystemExit):
        terminal.say_stopped(output / "page.md")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    terminal.say(
        f"\nTo send: {output / 'page.md'} and {output / 'result.json'}.\n"
        "To draw the picture, on any machine with matplotlib: "
        f"python -m lab.demo.picture {output / 'result.json'}"
    )


def end_of_time(_number: int, _frame: FrameType | None) -> None:
    """Ends the run when its minutes are over; a handler of SIGALRM."""
    raise BudgetReachedError(EXIT_CUT_OFF)


def _show_plan(share: float, pieces: tuple[Piece, ...], terminal: Terminal) -> None:
    rows = [[piece.name, piece.policy, piece.counts, f"{piece.seconds:.0f}"] for piece in pieces]
    rows.append(["sum", "", "", f"{total(pieces):.0f}"])
    terminal.table(
        f"What would run, with estimated seconds; answers have {share:.0%} of their full length",
        ["piece", "engine", "counts", "seconds"],
        rows,
    )


if __name__ == "__main__":
    typer.run(demo)
