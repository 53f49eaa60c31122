"""Implements `controller convert`: profiles as step-cost tables that other tools read, and back."""

from pathlib import Path
from typing import Annotated

import typer

from controller.cli.output import Output, OutputOption, exit_with_error, print_line, print_result
from controller.core.errors import InvalidProfileError, SpeculationError
from simulator.errors import InvalidInputError


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A profile (.json) or a step-cost table (.csv).")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The other one: .csv or .json.")],
    like: Annotated[
        Path | None,
        typer.Option(help="For .csv to .json: the profile whose engine and drafter were measured."),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="Which drafter of the profile; needed when it has several.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Writes a profile's cells as batch_size,num_draft_tokens,step_seconds, or the reverse.

    num_draft_tokens is gamma + 1: 1 is plain decoding.  A table holds one drafter and neither
    spread nor context; a profile made from one has the fingerprint and the context term of --like.

    Exit codes: 0 done, 2 anything else, with one line on standard error.
    """
    from controller.util.files import write_atomically

    try:
        _require_new_target(target, force=force)
        content, cells = _convert_file(source, target, like, drafter)
        write_atomically(target, content.encode())
    except OSError as error:
        exit_with_error(
            "convert", " ".join(f"{target}: cannot be written: {error.strerror}".splitlines())
        )
    except SpeculationError as error:
        exit_with_error("convert", " ".join(str(error).splitlines()))
    print_result(
        "ConvertedFile", {"path": target, "cells": cells}, output, [str(target)],
        lambda: print_line(f"{target}: {cells} cells"),
    )  # fmt: skip


def _require_new_target(target: Path, *, force: bool) -> None:

    if target.exists() and not force:
        raise InvalidInputError(target, 0, "is there already; --force replaces it")


def _convert_file(source: Path, target: Path, like: Path | None, drafter: str) -> tuple[str, int]:
    """(text, number of cells)."""
    kinds = (source.suffix.lower(), target.suffix.lower())
    if kinds == (".json", ".csv") and like is None:
        return _to_csv(source, drafter)
    if kinds == (".json", ".csv"):
        raise InvalidInputError(source, 0, "a profile knows its engine; --like is for a table")
    if kinds == (".csv", ".json") and like is not None:
        return _to_json(source, like, drafter)
    if kinds == (".csv", ".json"):
        raise InvalidInputError(source, 0, "a table names no engine; --like PROFILE.json is needed")
    raise InvalidInputError(
        source, 0, f"only .json to .csv and .csv to .json are possible, not to {target.name}"
    )


def _to_csv(source: Path, drafter: str) -> tuple[str, int]:
    """(text, number of cells)."""
    from simulator.step_costs import profile_table, read_profile, write_step_costs

    profile = read_profile(source)
    name = drafter or _single_drafter([d.name for d in profile.drafters], source)
    table = profile_table(profile, name, source)
    return write_step_costs(table), table.seconds.size


def _to_json(source: Path, like: Path, drafter: str) -> tuple[str, int]:
    """(text, number of cells)."""
    import dataclasses
    import shlex
    import sys

    from simulator.step_costs import read_profile, read_step_costs

    template = read_profile(like)
    name = drafter or _single_drafter([d.name for d in template.drafters], like)
    identity = tuple(d for d in template.drafters if d.name == name)
    if not identity:
        drafter_names = [d.name for d in template.drafters]
        raise InvalidInputError(like, 0, f"there is no drafter {name!r}, only {drafter_names}")
    try:
        profile = dataclasses.replace(
            template,
            drafters=identity,
            cells=read_step_costs(source).cells(name),
            measured_at="",
            command=shlex.join(["controller", *sys.argv[1:]]),
        )
    except InvalidProfileError as error:
        raise InvalidInputError(source, 0, str(error)) from error
    return profile.to_json(), len(profile.cells)


def _single_drafter(names: list[str], source: Path) -> str:
    """The drafter that is meant when none is named.  Raises InvalidInputError for several."""
    if len(names) == 1:
        return names[0]
    raise InvalidInputError(source, 0, f"has the drafters {names}; --drafter NAME is needed")
