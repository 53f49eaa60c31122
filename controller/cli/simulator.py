"""Adds the commands of the simulator, which is a separate, optional distribution."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from controller.cli.output import print_error
from controller.util.exit_codes import Exit

_MODULE = "simulator.commands"
# The help texts of the commands if the simulator is not installed.
_SUMMARIES = {
    "simulate": "Compares the controller with every static choice, hindsight, and the peers.",
    "convert": "Writes a profile's cells as batch_size,num_draft_tokens,step_seconds, or back.",
    "advise": "Advises which GPUs should train the drafter, and from which speedup it pays off.",
}
_ADVICE = "pip install speculation-controller-simulator"


class CommandGroup(TyperGroup):
    """The `controller` commands, those of the simulator included.

    The simulator imports this package, so it is imported last.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        app, installed = typer.Typer(rich_markup_mode="markdown"), _load_commands()
        for name, summary in _SUMMARIES.items():
            if installed:
                app.command(name)(installed[name])
            else:
                app.command(
                    name,
                    help=f"{summary} Not installed: {_ADVICE}",
                    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
                )(_missing_command(name))
        self.commands.update(typer.main.get_group(app).commands)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command.  Removes the prefix that pydantic adds to errors of option values."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def _load_commands() -> Mapping[str, Callable[..., None]]:
    """Returns the simulator's commands by name; {} if it is not installed."""
    try:
        commands: Mapping[str, Callable[..., None]] = import_module(_MODULE).COMMANDS
    except ModuleNotFoundError as error:
        # Another distribution may have a package of that name.
        if error.name not in {_MODULE, _MODULE.partition(".")[0]}:
            raise
        return {}
    return commands


def _missing_command(name: str) -> Callable[[], None]:
    def exit_with_advice() -> None:
        print_error(f"controller {name}: the simulator is not installed: {_ADVICE}")
        raise typer.Exit(Exit.USAGE)

    return exit_with_advice
