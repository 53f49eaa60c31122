"""Implements `controller profile push | pull | list | show | diff | merge`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.completion import engine_ids, profile_ids
from controller.cli.connection import DEFAULT_ADDRESS, Address, connected, for_operators
from controller.cli.output import (
    Column,
    FormOption,
    Listing,
    Output,
    OutputOption,
    plain_values,
    print_line,
    print_lines,
    print_table,
    print_words,
    refuse,
    show_one,
)
from controller.cli.output import show as show_list
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    import grpc

    from controller.core.cost.profile import Profile
    from speculation.v1 import service_pb2, service_pb2_grpc

_ANSWER_SECONDS = 10.0

Which = Annotated[
    str, typer.Argument(help="A file, or the id of a profile in the sidecar's profile store.")
]


def push(
    file: Annotated[Path, typer.Argument(help="A profile's file.")],
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Puts a profile into the sidecar's store, for all pods whose engine it matches."""
    from speculation.v1 import service_pb2

    text = _read(file).to_json()
    with connected(for_operators(address)) as channel:
        answer = _stub(channel).PushProfile(
            service_pb2.PushProfileRequest(profile_json=text), timeout=_ANSWER_SECONDS
        )
    show_one(
        "PushedProfile", plain_values(answer), output, [answer.profile_id],
        lambda: print_line(
            f"profile {answer.profile_id} is in the profile store, under identity {answer.identity}"
        ),
    )  # fmt: skip


def pull(
    profile_id: Annotated[
        str,
        typer.Argument(
            help="Id of a profile, or of an identity (all its measurements, merged).",
            show_default=False,
            autocompletion=profile_ids,
        ),
    ] = "",
    engine: Annotated[
        str,
        typer.Option(help="Instead of an id: the engine to match.", autocompletion=engine_ids),
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--output", help="File to write.", show_default="standard output"),
    ] = None,
    form: FormOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Fetches a profile from the sidecar's store, by its id, its identity or its engine."""
    if bool(profile_id) == bool(engine):
        raise typer.BadParameter("name either a profile id, or an engine with --engine")
    found = _fetched(address, profile_id, engine)
    if file is not None:
        _write(file, found)

    def tell() -> None:
        if file is None:
            print_lines(found.to_json().removesuffix("\n"))
        else:
            print_line(f"{file}: profile {found.profile_id}")

    show_one("Profile", profile_values(found, file), form, [found.profile_id], tell)


_PROFILES: "Listing[service_pb2.ShelvedProfile]" = Listing(
    "ProfileList",
    lambda item: item.profile_id,
    (
        Column("identity", lambda item: item.identity, priority=3),
        Column("profile", lambda item: item.profile_id),
        Column("target model", lambda item: item.fingerprint.target_model, priority=1),
        Column("device", lambda item: item.fingerprint.device, priority=2),
        Column("drafters", lambda item: ", ".join(item.drafters), priority=4),
        Column("measurements", lambda item: " ".join(item.measurements), priority=8),
        Column("cells", lambda item: str(item.cells), right=True, priority=7),
        Column("steps", lambda item: str(item.steps), right=True, priority=6),
        Column("newest", lambda item: item.measured_at, priority=5),
        Column("used by", lambda item: ", ".join(item.engine_ids) or "no engine here"),
    ),
    plain_values,
)


def list_(output: OutputOption = Output.TABLE, address: Address = DEFAULT_ADDRESS) -> None:
    """Lists the profiles in the sidecar's store, the newest first."""
    from controller.client.paging import every_page_of
    from speculation.v1 import service_pb2

    with connected(address) as channel:
        list_profiles = partial(_stub(channel).ListProfiles, timeout=_ANSWER_SECONDS)
        answer = every_page_of(list_profiles, service_pb2.ListProfilesRequest(), "profiles")
    none = "no profile is in the store: measure one with `controller profile`"
    show_list(_PROFILES, answer.profiles, output, none)


def show(
    which: Which,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
    acceptance: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Highest acceptance per draft position to assume for limits."
        ),
    ] = 0.9,
) -> None:
    """Prints a profile's step times and the engine that it was measured on."""
    from controller.core.cost.profile import batch_limits

    found = _profile(which, address)
    limits = batch_limits(found, acceptance)

    def tell() -> None:
        print_profile(found, wide=output is Output.WIDE)
        print_words(_about(found, limits, acceptance))

    values = profile_values(found) | {"graph_limits": limits}
    show_one("Profile", values, output, [found.profile_id], tell)


def print_profile(profile: "Profile", *, wide: bool) -> None:
    """Prints a profile's tables, and how they were measured."""
    from controller.profiling.report import measured_text, profile_tables

    for table in profile_tables(profile):
        print_table(table, wide=wide)
    print_words(measured_text(profile))


def profile_values(profile: "Profile", path: Path | None = None) -> dict[str, Any]:
    """Returns the document of a profile.  path: the file that it was written to."""
    import json

    where = {} if path is None else {"path": path}
    return {"profile_id": profile.profile_id, **where, "profile": json.loads(profile.to_json())}


def _about(found: "Profile", limits: dict[int, int], acceptance: float) -> str:
    import dataclasses

    lines = [f"profile {found.profile_id}, measured {found.measured_at or 'at an unknown time'}"]
    if found.merged_from:
        lines.append(f"  merged from {', '.join(found.merged_from)}")
    lines += [
        f"  {name}: {value}"
        for name, value in dataclasses.asdict(found.fingerprint).items()
        if value not in ("", ())
    ]
    lines += [f"  drafter {d.name}: {d.model}@{d.revision}" for d in found.drafters]
    if limits:
        listed = ",".join(f"{gamma}:{size}" for gamma, size in limits.items())
        lines += [
            f"with acceptance up to {acceptance:g}, larger batches gain nothing from these:",
            f"  SPECULATION_GRAPH_LIMITS={listed}",
        ]
    return "\n".join(lines)


def diff(
    one: Which,
    other: Which,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Compares two profiles: their engines, and their step times.

    Exit codes: 0 the same engine, 3 different engines (the fields are named), 2 a file is not a
    profile, 13 the store has no profile with this id.
    """
    import dataclasses

    from controller.core.cost.profile_merge import differences
    from controller.profiling.report import cell_differences, difference_tables

    here, there = _profile(one, address), _profile(other, address)
    different = differences(here, there)
    cells = cell_differences(here, there)

    def tell() -> None:
        for field, mine, theirs in different:
            print_words(f"{field}: {mine!r} in {one}, {theirs!r} in {other}")
        for table in difference_tables(cells):
            print_table(table, wide=output is Output.WIDE)
        print_line("!: differs by more than the sum of both spreads; -: only in one profile")

    fields = [{"field": name, "first": mine, "second": its} for name, mine, its in different]
    values = {"fields": fields, "cells": [dataclasses.asdict(cell) for cell in cells]}
    show_one("ProfileDifference", values, output, [name for name, _, _ in different], tell)
    if different:
        raise typer.Exit(Exit.MISMATCH)


def merge(
    files: Annotated[list[Path], typer.Argument(help="Profiles of one engine.")],
    file: Annotated[Path, typer.Option("--output", help="File to write.")],
    form: FormOption = Output.TABLE,
) -> None:
    """Merges profiles that several pods measured; spreads and step counts are combined."""
    from controller.core.cost.profile_merge import merge_profiles
    from controller.core.errors import ProfileMergeError

    try:
        merged = merge_profiles([_read(each) for each in files])
    except ProfileMergeError as error:
        refuse("profile", str(error))
    _write(file, merged)
    count = len(merged.merged_from)
    show_one(
        "Profile", profile_values(merged, file), form, [merged.profile_id],
        lambda: print_line(f"{file}: profile {merged.profile_id}, from {count} measurements"),
    )  # fmt: skip


def _profile(which: str, address: str) -> "Profile":
    # A text that looks like an id is a file name only if that file exists.
    if re.fullmatch(r"[0-9a-f]{16}", which) and not Path(which).exists():
        return _fetched(address, which, "")
    return _read(Path(which))


def _fetched(address: str, profile_id: str, engine: str) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.core.errors import InvalidProfileError
    from speculation.v1 import service_pb2

    request = (
        service_pb2.GetProfileRequest(engine_id=engine)
        if engine
        else service_pb2.GetProfileRequest(profile_id=profile_id)
    )
    with connected(address) as channel:
        answer = _stub(channel).GetProfile(request, timeout=_ANSWER_SECONDS)
    try:
        return Profile.from_json(answer.profile_json)
    except InvalidProfileError as error:
        refuse("profile", f"the sidecar's answer is not a valid profile: {error}")


def _stub(channel: "grpc.Channel") -> "service_pb2_grpc.ProfilingServiceStub":
    from speculation.v1 import service_pb2_grpc

    return service_pb2_grpc.ProfilingServiceStub(channel)


def _read(file: Path) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.core.errors import InvalidProfileError

    try:
        return Profile.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        refuse("profile", f"{file}: {error.strerror}")
    except (InvalidProfileError, UnicodeDecodeError) as error:
        refuse("profile", f"{file} is not a valid profile: {error}")


def _write(file: Path, what: "Profile") -> None:
    from controller.util.files import write_whole

    try:
        write_whole(file, what.to_json().encode())
    except OSError as error:
        refuse("profile", f"{file}: {error.strerror}")


COMMANDS: dict[str, Callable[..., None]] = {
    "push": push,
    "pull": pull,
    "list": list_,
    "show": show,
    "diff": diff,
    "merge": merge,
}
