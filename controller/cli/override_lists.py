"""Implements `controller override list`, `watch` and `log`, and `controller policy check`.

The first three show the active overrides and their audit; the last reads a policy file.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from controller.cli.completion import override_ids
from controller.cli.connection import DEFAULT_ADDRESS, Address, open_connection
from controller.cli.output import (
    TABLES,
    Column,
    Listing,
    Output,
    OutputOption,
    exit_with_error,
    plain_values,
    print_change,
    print_error,
    print_line,
    print_list,
)
from controller.util.text import timestamp_text
from controller.wire.override_text import (
    PRECEDENCE,
    enum_name,
    held_override_text,
    rule_text,
    scope_text,
)

if TYPE_CHECKING:
    from speculation.v1 import policy_pb2

_ANSWER_SECONDS_MAX = 10.0


def list_(
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Shows the overrides in force, and which one wins."""
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with open_connection(address) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
            policy_pb2.ListOverridesRequest(), timeout=_ANSWER_SECONDS_MAX
        )
    print_list(_OVERRIDES, answer.overrides, output, "no override is in force")
    if answer.overrides and output in TABLES:
        print_line(PRECEDENCE)
    if answer.HasField("policy") and not answer.policy.ok:
        print_error(
            "the policy file cannot be used, and its previous version stays in force: "
            f"{answer.policy.detail}"
        )
    if not answer.store.ok:
        print_error(f"the store has failed: {answer.store.detail}")
    if answer.store.unusable_count:
        print_error(f"{answer.store.unusable_count} overrides in the store are not in force:")
        for line in answer.store.unusable:
            print_error(f"  {line}")


def watch(
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Shows the active overrides, then every change, until Ctrl-C.

    -o json prints one line for each change, -o yaml a stream of documents, -o name the id.
    """
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with contextlib.suppress(KeyboardInterrupt), open_connection(address) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        is_table = output in TABLES
        if is_table:
            print_line(PRECEDENCE)
        for change in stub.WatchOverrides(policy_pb2.WatchOverridesRequest()):
            entry, kind = change.held, enum_name(change, "kind", "KIND_")
            if not is_table:
                values = {"change": kind, "held": plain_values(entry)}
                print_change("OverrideNews", values, output, entry.override.override_id)
                continue
            print_line(f"{kind:8} {entry.override.override_id}  {held_override_text(entry)}")


def log(
    override_id: Annotated[
        str, typer.Argument(help="Show only this override.", autocompletion=override_ids)
    ] = "",
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of records to print_list.")
    ] = 50,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Shows who changed which override, when, why and from where; the newest first."""
    from controller.client.paging import PageFollower
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with open_connection(address) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        request = policy_pb2.QueryAuditRequest(limit=limit, override_id=override_id)
        records: list[policy_pb2.AuditRecord] = []
        pages = PageFollower()
        while request.limit:
            answer = stub.QueryAudit(request, timeout=_ANSWER_SECONDS_MAX)
            records += answer.records[: request.limit]
            request.page_token = pages.next_token(answer)
            request.limit = limit - len(records) if request.page_token else 0
    print_list(_CHANGES, records, output, "no override was ever changed")


def _utc_text(seconds: float) -> str:
    """Formats Unix seconds in UTC."""
    return timestamp_text(seconds, utc=True)


def _override_text(record: "policy_pb2.AuditRecord", name: Literal["before", "after"]) -> str:
    if not record.HasField(name):
        return "-"
    override = record.before if name == "before" else record.after
    return f"{scope_text(override)}: {rule_text(override)}"


def remaining_text(entry: "policy_pb2.HeldOverride") -> str:
    """Returns the remaining time of an override as text."""
    if entry.origin:
        return "with its file"
    if not entry.HasField("remaining_seconds"):
        return "permanent"
    seconds = round(entry.remaining_seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds} s"


_OVERRIDES: "Listing[policy_pb2.HeldOverride]" = Listing(
    "OverrideList",
    lambda held: held.override.override_id,
    (
        Column("override", lambda held: held.override.override_id),
        Column("for", lambda held: scope_text(held.override), priority=1),
        Column("what", lambda held: rule_text(held.override)),
        Column("origin", lambda held: held.origin or "operator", priority=5),
        Column("who", lambda held: held.override.author, priority=3),
        Column("why", lambda held: held.override.reason, priority=2),
        Column("set at", lambda held: _utc_text(held.created_at), priority=6),
        Column("ends in", remaining_text, is_right_aligned=True, priority=1),
        Column("etag", lambda held: held.etag or "-", priority=7),
    ),
    plain_values,
)
_CHANGES: "Listing[policy_pb2.AuditRecord]" = Listing(
    "OverrideChangeList",
    lambda record: record.override_id,
    (
        Column("when", lambda record: _utc_text(record.at)),
        Column("what", lambda record: record.action, priority=1),
        Column("override", lambda record: record.override_id),
        Column("who", lambda record: record.author or "-", priority=2),
        Column("why", lambda record: record.reason, priority=3),
        Column("from", lambda record: record.origin, priority=6),
        Column("before", lambda record: _override_text(record, "before"), priority=5),
        Column("after", lambda record: _override_text(record, "after"), priority=4),
    ),
    plain_values,
)


policy = typer.Typer(no_args_is_help=True, help="File-based policy (CONTROLLER_POLICY).")


# With a callback, the one command keeps its name.
@policy.callback()
def _policy() -> None: ...


@policy.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Checks a policy file without a sidecar, and prints the overrides that it defines.

    Exit codes: 0 a sidecar would accept the file, 2 it would refuse it.
    """
    from controller.settings.policy_file import PolicyFileError, read_policy
    from controller.wire.overrides import override_to_proto

    try:
        overrides, _ = read_policy(file)
    except PolicyFileError as error:
        exit_with_error("policy", error)
    print_list(_RULES, [*map(override_to_proto, overrides)], output, "the file is an empty policy")


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
