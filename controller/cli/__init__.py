"""The command line.  Commands import what they need when they run, so that `--help` is fast."""

import os
import sys
from typing import Annotated

import typer

from controller.cli import (
    completion,
    doctor,
    explain,
    override,
    override_lists,
    profile,
    profiles,
    replay,
    serve,
    top,
)
from controller.cli.output import Output, OutputOption, print_error, print_line, print_result
from controller.cli.simulator import CommandGroup
from controller.util.exit_codes import Exit

app = typer.Typer(
    name="controller",
    cls=CommandGroup,
    help="Chooses the draft length of speculative decoding while LLM engines serve.",
    # Subcommands inherit it.
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Line breaks of docstrings are not those of the terminal.
    rich_markup_mode="markdown",
)
app.command("serve")(serve.serve)
app.command("config", context_settings=serve.CONFIG_CONTEXT)(serve.config)
app.add_typer(profile.profile, name="profile")
for _name, _command in profiles.COMMANDS.items():
    profile.profile.command(_name)(_command)
app.command("engines")(explain.engines)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.add_typer(override.override, name="override")
app.add_typer(override_lists.policy, name="policy")
app.command("doctor")(doctor.doctor)
app.command("replay")(replay.replay)
app.command("report")(replay.report)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


@app.command("version")
def version(output: OutputOption = Output.TABLE) -> None:
    """Prints the version."""
    import controller

    number = controller.__version__
    print_result("Version", {"version": number}, output, [number], lambda: print_line(number))


def main() -> None:
    """Entry point of the `controller` script."""
    try:
        with completion.join_bash_words(os.environ):
            app(prog_name="controller")
    except SystemExit as ended:
        # The reader of the pipe closed it before everything was printed.
        if isinstance(ended.__context__, BrokenPipeError) or not _is_flushed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(Exit.BROKEN_PIPE) from ended
        raise
    except UnicodeEncodeError as error:
        # An argument that is not UTF-8 cannot be sent to the sidecar or printed.
        print_error(f"controller: {ascii(error.object)[:200]} is not UTF-8 text")
        raise SystemExit(Exit.USAGE) from error


def _is_flushed() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return False
    return True


__all__ = ["app", "main"]
