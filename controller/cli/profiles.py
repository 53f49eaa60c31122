"""Implements `controller profile push | pull | list | show | diff | merge`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.completion import engine_ids, profile_ids
from controller.cli.connection import (
    DEFAULT_ADDRESS,
    Address,
    open_connection,
    to_operators_address,
)
from controller.cli.output import (
    Column,
    FormOption,
    Listing,
    Output,
    OutputOption,
    exit_with_error,
    plain_values,
    print_line,
    print_lines,
    print_result,
    print_table,
    print_wrapped,
)
from controller.cli.output import print_list as show_list
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    import grpc

    from controller.core.cost.profile import Profile
    from speculation.v1 import service_pb2, service_pb2_grpc

_ANSWER_SECONDS = 10.0

ProfileArgument = Annotated[
    str, typer.Argument(help="A file, or the id of a profile in the sidecar's profile store.")
]


def push(
    file: Annotated[Path, typer.Argument(help="A profile's file.")],
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Puts a profile into the sidecar's store, for all pods whose engine it matches."""
    from speculation.v1 import service_pb2

    text = _read_file(file).to_json()
    with open_connection(to_operators_address(address)) as channel:
        answer = _stub(channel).PushProfile(
            service_pb2.PushProfileRequest(profile_json=text), timeout=_ANSWER_SECONDS
        )
    print_result(
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
    profile = _fetch_profile(address, profile_id, engine)
    if file is not None:
        _write_file(file, profile)

    def print_text() -> None:
        if file is None:
            print_lines(profile.to_json().removesuffix("\n"))
        else:
            print_line(f"{file}: profile {profile.profile_id}")

    print_result("Profile", profile_values(profile, file), form, [profile.profile_id], print_text)


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
        Column("cells", lambda item: str(item.cells), is_right_aligned=True, priority=7),
        Column("steps", lambda item: str(item.steps), is_right_aligned=True, priority=6),
        Column("newest", lambda item: item.measured_at, priority=5),
        Column("used by", lambda item: ", ".join(item.engine_ids) or "no engine here"),
    ),
    plain_values,
)


def list_(output: OutputOption = Output.TABLE, address: Address = DEFAULT_ADDRESS) -> None:
    """Lists the profiles in the sidecar's store, the newest first."""
    from controller.client.paging import collect_request_pages
    from speculation.v1 import service_pb2

    with open_connection(address) as channel:
        list_profiles = partial(_stub(channel).ListProfiles, timeout=_ANSWER_SECONDS)
        answer = collect_request_pages(list_profiles, service_pb2.ListProfilesRequest(), "profiles")
    none = "no profile is in the store: measure one with `controller profile`"
    show_list(_PROFILES, answer.profiles, output, none)


def show(
    which: ProfileArgument,
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

    profile = _load_profile(which, address)
    limits = batch_limits(profile, acceptance)

    def print_text() -> None:
        print_profile(profile, wide=output is Output.WIDE)
        print_wrapped(_profile_text(profile, limits, acceptance))

    values = profile_values(profile) | {"graph_limits": limits}
    print_result("Profile", values, output, [profile.profile_id], print_text)


def print_profile(profile: "Profile", *, wide: bool) -> None:
    """Prints a profile's tables, and how they were measured."""
    from controller.profiling.report import measured_text, profile_tables

    for table in profile_tables(profile):
        print_table(table, wide=wide)
    print_wrapped(measured_text(profile))


def profile_values(profile: "Profile", path: Path | None = None) -> dict[str, Any]:
    """Returns the document of a profile.  path: the file that it was written to."""
    import json

    path_values = {} if path is None else {"path": path}
    return {
        "profile_id": profile.profile_id,
        **path_values,
        "profile": json.loads(profile.to_json()),
    }


def _profile_text(profile: "Profile", limits: dict[int, int], acceptance: float) -> str:
    import dataclasses

    lines = [
        f"profile {profile.profile_id}, measured {profile.measured_at or 'at an unknown time'}"
    ]
    if profile.merged_from:
        lines.append(f"  merged from {', '.join(profile.merged_from)}")
    lines += [
        f"  {name}: {value}"
        for name, value in dataclasses.asdict(profile.fingerprint).items()
        if value not in ("", ())
    ]
    lines += [f"  drafter {d.name}: {d.model}@{d.revision}" for d in profile.drafters]
    if limits:
        listed = ",".join(f"{gamma}:{size}" for gamma, size in limits.items())
        lines += [
            f"with acceptance up to {acceptance:g}, larger batches gain nothing from these:",
            f"  SPECULATION_GRAPH_LIMITS={listed}",
        ]
    return "\n".join(lines)


def diff(
    one: ProfileArgument,
    other: ProfileArgument,
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

    first_profile, second_profile = _load_profile(one, address), _load_profile(other, address)
    different = differences(first_profile, second_profile)
    cells = cell_differences(first_profile, second_profile)

    def print_text() -> None:
        for field, first_value, second_value in different:
            print_wrapped(f"{field}: {first_value!r} in {one}, {second_value!r} in {other}")
        for table in difference_tables(cells):
            print_table(table, wide=output is Output.WIDE)
        print_line("!: differs by more than the sum of both spreads; -: only in one profile")

    fields = [
        {"field": name, "first": first_value, "second": second_value}
        for name, first_value, second_value in different
    ]
    values = {"fields": fields, "cells": [dataclasses.asdict(cell) for cell in cells]}
    print_result(
        "ProfileDifference", values, output, [name for name, _, _ in different], print_text
    )
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
        merged = merge_profiles([_read_file(path) for path in files])
    except ProfileMergeError as error:
        exit_with_error("profile", str(error))
    _write_file(file, merged)
    count = len(merged.merged_from)
    print_result(
        "Profile", profile_values(merged, file), form, [merged.profile_id],
        lambda: print_line(f"{file}: profile {merged.profile_id}, from {count} measurements"),
    )  # fmt: skip


def _load_profile(which: str, address: str) -> "Profile":
    # A text that looks like an id is a file name only if that file exists.
    if re.fullmatch(r"[0-9a-f]{16}", which) and not Path(which).exists():
        return _fetch_profile(address, which, "")
    return _read_file(Path(which))


def _fetch_profile(address: str, profile_id: str, engine: str) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.core.errors import InvalidProfileError
    from speculation.v1 import service_pb2

    request = (
        service_pb2.GetProfileRequest(engine_id=engine)
        if engine
        else service_pb2.GetProfileRequest(profile_id=profile_id)
    )
    with open_connection(address) as channel:
        answer = _stub(channel).GetProfile(request, timeout=_ANSWER_SECONDS)
    try:
        return Profile.from_json(answer.profile_json)
    except InvalidProfileError as error:
        exit_with_error("profile", f"the sidecar's answer is not a valid profile: {error}")


def _stub(channel: "grpc.Channel") -> "service_pb2_grpc.ProfilingServiceStub":
    from speculation.v1 import service_pb2_grpc

    return service_pb2_grpc.ProfilingServiceStub(channel)


def _read_file(file: Path) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.core.errors import InvalidProfileError

    try:
        return Profile.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        exit_with_error("profile", f"{file}: {error.strerror}")
    except (InvalidProfileError, UnicodeDecodeError) as error:
        exit_with_error("profile", f"{file} is not a valid profile: {error}")


def _write_file(file: Path, profile: "Profile") -> None:
    from controller.util.files import write_atomically

    try:
        write_atomically(file, profile.to_json().encode())
    except OSError as error:
        exit_with_error("profile", f"{file}: {error.strerror}")


COMMANDS: dict[str, Callable[..., None]] = {
    "push": push,
    "pull": pull,
    "list": list_,
    "show": show,
    "diff": diff,
    "merge": merge,
}
