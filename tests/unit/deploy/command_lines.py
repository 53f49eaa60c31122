"""Command lines, as the programs themselves read them."""

from typing import Any

import typer

from controller.cli import app


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of `controller …`; fails where it would be refused."""
    assert command[0] == "controller"
    group: Any = typer.main.get_command(app)
    with group.make_context("controller", command[1:], resilient_parsing=True) as context:
        name, subcommand, rest = group.resolve_command(context, command[1:])
    parameters: dict[str, Any] = subcommand.make_context(name, rest).params
    return parameters
