"""Implements `controller profile`: measures step costs on a running engine, through its shim."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.completion import engine_ids
from controller.cli.connection import DEFAULT_ADDRESS, checked_address
from controller.cli.output import (
    FormOption,
    Output,
    exit_with_error,
    print_error,
    print_result,
    print_wrapped,
)
from controller.cli.profiles import print_profile, profile_values
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    from controller.profiling import ProfileOutcome, ProfileRequest

profile = typer.Typer()

# 130 and 143 after SIGINT and SIGTERM.
_EXIT_SIGNAL = 128


@profile.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    engine_url: Annotated[
        str, typer.Option(help="The engine's HTTP API, which supplies the load.")
    ] = "http://localhost:30000",
    sidecar: Annotated[
        str,
        typer.Option(
            "--sidecar",
            "--address",
            envvar="CONTROLLER_ADDRESS",
            callback=checked_address,
            help="Where the sidecar serves: unix:PATH, /PATH or HOST:PORT.",
        ),
    ] = DEFAULT_ADDRESS,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The profile's file.", show_default="profiles/<model>-<device>-<digest>.json"
        ),
    ] = None,
    engine_id: Annotated[
        str,
        typer.Option(
            help="Engine to measure; needed if several are connected to the sidecar.",
            autocompletion=engine_ids,
        ),
    ] = "",
    batch_sizes: Annotated[
        str,
        typer.Option(
            help="Batch sizes to measure, separated by commas.",
            show_default="powers of two up to the engine's largest, or 64",
        ),
    ] = "",
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for the measurement.")] = 45.0,
    tolerance: Annotated[
        float,
        typer.Option(
            help="A cell is done if the 95 % interval of its median has this relative half width."
        ),
    ] = 0.01,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of the loads, in tokens.")
    ] = 128,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Text for the prompts, instead of random words."
        ),
    ] = None,
    wait_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long to wait for the sidecar and the engine.")
    ] = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="Measure even if a profile exists, and replace it.")
    ] = False,
    api_key: Annotated[
        str, typer.Option(envvar="ENGINE_API_KEY", help="The engine's API key, if it has one.")
    ] = "",
    form: FormOption = Output.TABLE,
) -> None:
    """Measures the seconds of a step for every draft length and batch size, gamma = 0 included.

    This command generates the load, and the sidecar makes the engine run each draft length in
    turn.  The profile is installed in the sidecar and put into its profile store for pods of the
    same kind.  A profile of this engine at --output or in that store is reused; another engine's is
    refused.  An interrupted measurement is continued.  Send no other requests to the engine.

    Exit codes: 0 done, 1 other errors, 2 usage, 3 the file at --output is not a profile of this
    engine, 4 no sidecar, 5 no engine, 6 no or several engines are connected to the sidecar, 7 the
    measurement failed, 12 permission denied, 130 and 143 stopped by SIGINT or SIGTERM.
    """
    import os
    import sys

    if context.invoked_subcommand is not None:
        return
    # Before grpc is imported: it would print its own lines on standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from controller.core.errors import SpeculationError
    from controller.profiling import ProfileRequest, ProfilingError, ProfilingSettings

    try:
        request = ProfileRequest(
            engine_url=engine_url,
            sidecar=sidecar,
            output=output,
            engine_id=engine_id,
            settings=ProfilingSettings(
                batch_sizes=_parse_batch_sizes(batch_sizes),
                budget_seconds=budget,
                tolerance=tolerance,
                context_tokens=context_tokens,
            ),
            wait_seconds=wait_seconds,
            force=force,
            prompt_text=prompts.read_text(encoding="utf-8") if prompts else "",
            api_key=api_key,
            command=_command_line(sys.argv[1:], api_key),
        )
        outcome = _run_measurement(request)
    except (SpeculationError, UnicodeDecodeError) as error:
        code = error.exit_code if isinstance(error, ProfilingError) else Exit.FAILED
        exit_with_error("profile", error, code)
    _print_outcome(outcome, form)


def _command_line(arguments: list[str], secret: str) -> str:
    """Returns the command line that the profile records, without the API key."""
    import shlex

    shown = [part.replace(secret, "***") if secret else part for part in arguments]
    return shlex.join(["controller", *shown])


def _parse_batch_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a list of integers separated by commas, such as 1,2,4"
        ) from error


def _run_measurement(request: "ProfileRequest") -> "ProfileOutcome":
    """Runs the measurement.  On SIGINT and SIGTERM it ends, and keeps what was measured."""
    import asyncio
    import signal
    import sys

    from controller.profiling import profile_engine
    from controller.profiling.progress import BarReporter, LineReporter

    signals: list[signal.Signals] = []

    async def run() -> "ProfileOutcome":
        task = asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            signals.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        with BarReporter() if sys.stderr.isatty() else LineReporter() as reporter:
            return await profile_engine(request, reporter)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        name = signals[0].name if signals else "cancelled"
        print_error(f"controller profile: stopped ({name})")
        raise typer.Exit(_EXIT_SIGNAL + (signals[0] if signals else 0)) from None


def _print_outcome(outcome: "ProfileOutcome", output: Output) -> None:
    profile = outcome.profile

    def print_text() -> None:
        print_profile(profile, wide=output is Output.WIDE)
        origin = "reused" if outcome.reused else f"measured in {outcome.seconds:.1f} s"
        print_wrapped(
            f"{outcome.path}: profile {profile.profile_id}, {origin}; in use by "
            f"{', '.join(outcome.engine_ids)}"
        )

    print_result(
        "Profile",
        profile_values(profile, outcome.path)
        | {
            "reused": outcome.reused,
            "seconds": outcome.seconds,
            "engine_ids": outcome.engine_ids,
        },
        output,
        [profile.profile_id],
        print_text,
    )
