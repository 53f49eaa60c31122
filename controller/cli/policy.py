"""Implements `controller policy check`: reads a policy file as a sidecar would."""

from pathlib import Path
from typing import Annotated

import typer

from controller.util.exit_codes import Exit

policy = typer.Typer(no_args_is_help=True, help="File-based policy (CONTROLLER_POLICY).")


# With a callback, the one command keeps its name.
@policy.callback()
def _policy() -> None: ...


@policy.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
) -> None:
    """Reads a policy file, without a sidecar, and prints what it stands for.

    Exit codes: 0 a sidecar would put it into force, 2 it would not.
    """
    from controller.settings.policy_file import PolicyFileError, read_policy
    from controller.wire.override_text import rule_text, scope_text
    from controller.wire.overrides import override_to_proto

    try:
        overrides, _ = read_policy(file)
    except PolicyFileError as error:
        typer.echo(f"controller policy: {error}", err=True)
        raise typer.Exit(Exit.USAGE) from error
    for override in overrides:
        message = override_to_proto(override)
        print(
            f"{override.override_id}  {scope_text(message)}: {rule_text(message)}; "
            f"{override.reason}"
        )
    if not overrides:
        print("the file is an empty policy")
