"""Shows the engines of all sidecars that share a store: `top --fleet` and `engines --fleet`."""

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import (
    DOCUMENTS,
    Column,
    Listing,
    Output,
    optional_column,
    print_document,
    print_line,
    print_list,
)

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from speculation.v1 import service_pb2

_ANSWER_SECONDS_MAX = 5.0
LINKS = {"steered": "green", "alone": "red", "away": "yellow", "silent": "red"}

FleetOption = Annotated[
    bool,
    typer.Option("--fleet", help="Show the engines of all sidecars that share the store."),
]
FilterOption = Annotated[
    str,
    typer.Option(
        "--filter",
        help="With --fleet: show matching engines only, e.g. `pod-7 link=alone` (docs/fleet.md).",
    ),
]


def require_fleet(*, fleet: bool, filter_text: str) -> None:
    """Raises a usage error if --filter is given without --fleet."""
    if filter_text and not fleet:
        raise typer.BadParameter("--filter needs --fleet")


def read_fleet(channel: "grpc.Channel", filter_text: str) -> "service_pb2.ListFleetResponse":
    """Returns the engines of all pages.  Raises grpc.RpcError."""
    from controller.client.paging import collect_request_pages
    from speculation.v1 import service_pb2, service_pb2_grpc

    list_fleet = service_pb2_grpc.InspectionServiceStub(channel).ListFleet
    return collect_request_pages(
        partial(list_fleet, timeout=_ANSWER_SECONDS_MAX),
        service_pb2.ListFleetRequest(filter=filter_text),
    )


def show_fleet(answer: "service_pb2.ListFleetResponse", output: Output) -> None:
    """Prints the engines.  Tables and documents also have the totals and what is missing."""
    if output in DOCUMENTS:
        print_document(FLEET.kind, fleet_document(answer), output)
        return
    print_list(FLEET, answer.engines, output, "no engine is known")
    if output is not Output.NAME:
        for line in footer_lines(answer):
            print_line(line)


def header_line(answer: "service_pb2.ListFleetResponse") -> str:
    """Returns the line above a live table."""
    clock = time.strftime("%H:%M:%S")
    return f"controller {answer.version}  {clock}  engines of the fleet: {answer.totals.engines}"


def footer_lines(answer: "service_pb2.ListFleetResponse") -> list[str]:
    """Returns the lines below the table: the totals, and what the table does not show."""
    totals = answer.totals
    counts = {
        "steered": totals.steered,
        "off": totals.off,
        "unsteered": totals.unsteered,
        "not heard of": totals.silent,
        "waiting": totals.waiting,
        "overridden": totals.overridden,
        "not shown": totals.unavailable,
    }
    always = ("steered", "off", "unsteered", "not heard of")
    count_texts = [f"{name} {count}" for name, count in counts.items() if count or name in always]
    rate, gained = totals.generated_per_second, totals.tokens_gained_per_second
    lines = [
        f"{totals.engines} engines of {totals.sidecars} sidecars: {', '.join(count_texts)}",
        f"{rate:,.0f} tokens/s, {gained:+,.0f} against γ = 0 (estimated)",
    ]
    if answer.trouble:
        lines.append(f"only the engines of this sidecar are shown: {answer.trouble}")
    if answer.refused:
        lines.append(f"{answer.refused} entries in the store cannot be used")
    if answer.left_out:
        lines.append(f"{answer.left_out} engines or sidecars are not shown: the view is full")
    return lines


def fleet_document(answer: "service_pb2.ListFleetResponse") -> dict[str, Any]:
    """Returns the engines, the totals and what is missing as plain values."""
    values = _values(answer)
    del values["next_page_token"]
    return {"items": values.pop("engines"), **values}


def _values(message: "Message") -> dict[str, Any]:
    """Returns plain values, including zeros: a program counts engines whose gamma is 0."""
    import inspect

    from google.protobuf import json_format

    # The first name is that of protobuf 5.26 and later, the second of earlier versions.
    names = ("always_print_fields_with_no_presence", "including_default_value_fields")
    parameters = inspect.signature(json_format.MessageToDict).parameters
    options: dict[str, Any] = {next(name for name in names if name in parameters): True}
    values: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, **options
    )
    return values


def _overrides_text(line: "service_pb2.FleetEngine") -> str:
    rest_text = [f"and {line.more_overrides} more"] if line.more_overrides else []
    return ", ".join([*line.overrides, *rest_text]) or "-"


FLEET: "Listing[service_pb2.FleetEngine]" = Listing(
    "FleetEngineList",
    lambda line: line.engine_id,
    (
        Column("engine", lambda line: line.engine_id, style=lambda _: "bold"),
        Column("B", lambda line: str(line.batch_size or "-"), is_right_aligned=True),
        Column(
            "γ", lambda line: str(line.gamma), is_right_aligned=True, style=lambda _: "bold cyan"
        ),
        Column("drafter", lambda line: line.drafter, priority=2),
        optional_column("τ", "accept_length", "{:.2f}", priority=3),
        optional_column("tokens/s", "tokens_per_second", "{:.0f}", priority=5),
        optional_column("gain", "gain", "x{:.2f}", priority=2),
        optional_column("gained/s", "tokens_gained_per_second", "{:+.0f}", priority=6),
        Column("reason", lambda line: line.reason, priority=7),
        Column("link", lambda line: line.link, priority=1, style=lambda link: LINKS.get(link, "")),
        Column("overrides", _overrides_text, priority=4),
        Column("age", lambda line: f"{line.age_seconds:.0f} s", is_right_aligned=True, priority=8),
        Column("sidecar", lambda line: line.sidecar, priority=9),
        Column("model", lambda line: line.target_model, is_wide_only=True),
    ),
    _values,
    lambda line: line.unavailable,
)  # fmt: skip
