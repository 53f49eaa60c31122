"""Implements `controller policy check`: reads a policy file as a sidecar would."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    plain_values,
    print_error,
    show,
)
from controller.util.exit_codes import Exit
from controller.wire.override_text import rule_text, scope_text

if TYPE_CHECKING:
    from speculation.v1 import policy_pb2

policy = typer.Typer(no_args_is_help=True, help="File-based policy (CONTROLLER_POLICY).")


# With a callback, the one command keeps its name.
@policy.callback()
def _policy() -> None: ...


@policy.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Reads a policy file, without a sidecar, and prints what it stands for.

    Exit codes: 0 a sidecar would put it into force, 2 it would not.
    """
    from controller.settings.policy_file import PolicyFileError, read_policy
    from controller.wire.overrides import override_to_proto

    try:
        overrides, _ = read_policy(file)
    except PolicyFileError as error:
        print_error(f"controller policy: {error}")
        raise typer.Exit(Exit.USAGE) from error
    show(_RULES, [*map(override_to_proto, overrides)], output, "the file is an empty policy")


_RULES: "Listing[policy_pb2.Override]" = Listing(
    "PolicyOverrideList",
    lambda override: override.override_id,
    (
        Column("override", lambda override: override.override_id),
        Column("for", scope_text, priority=1),
        Column("what", rule_text),
        Column("why", lambda override: override.reason, priority=2),
    ),
    plain_values,
)
