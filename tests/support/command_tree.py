"""The commands of an application, however they are nested."""

from collections.abc import Iterator
from typing import Any

import typer


def list_commands(app: typer.Typer) -> dict[str, Any]:
    """Every command that does something, by its words; a group only if it runs by itself."""
    return dict(_commands(typer.main.get_command(app), ()))


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if words and (inner is None or command.invoke_without_command):
        yield " ".join(words), command
    for name, subcommand in (inner or {}).items():
        yield from _commands(subcommand, (*words, name))
