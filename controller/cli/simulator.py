"""The commands of the simulator, a distribution of its own that need not be installed."""

from collections.abc import Callable, Mapping
from importlib import import_module

import typer

from controller.cli.output import print_error
from controller.util.exit_codes import Exit

_MODULE = "simulator.commands"
# What `--help` says of those that are not installed.
_SUMMARIES = {
    "simulate": "Compares the controller with every static choice, hindsight, and the peers.",
    "convert": "Writes a profile's cells as batch_size,num_draft_tokens,step_seconds, or back.",
    "advise": "Tells which GPUs should train, and from which speedup on it pays.",
}
_ADVICE = "pip install speculation-controller-simulator"


def add_commands(app: typer.Typer) -> None:
    """Adds the simulator's commands; where it is not installed, they say how to install it."""
    installed = _installed()
    for name, summary in _SUMMARIES.items():
        if installed:
            app.command(name)(installed[name])
        else:
            app.command(
                name,
                help=f"{summary} Not installed: {_ADVICE}",
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_absent(name))


def _installed() -> Mapping[str, Callable[..., None]]:
    """The simulator's commands by name; {} where it is not installed."""
    try:
        # By name, for the simulator stands on the sidecar, and never the reverse.
        found: Mapping[str, Callable[..., None]] = import_module(_MODULE).COMMANDS
    except ModuleNotFoundError as error:
        # Another distribution may have a package of that name.
        if error.name not in {_MODULE, _MODULE.partition(".")[0]}:
            raise
        return {}
    return found


def _absent(name: str) -> Callable[[], None]:
    def refuse() -> None:
        print_error(f"controller {name}: the simulator is not installed: {_ADVICE}")
        raise typer.Exit(Exit.USAGE)

    return refuse
