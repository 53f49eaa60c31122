"""Implements `controller top`: the engines of a running sidecar, live."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from controller.cli.connection import (
    DEFAULT_ADDRESS,
    Address,
    is_unreachable,
    open_channel,
    open_connection,
)
from controller.cli.fleet import (
    FLEET,
    LINKS,
    FilterOption,
    FleetOption,
    fleet_document,
    footer_lines,
    header_line,
    read_fleet,
    require_fleet,
    show_fleet,
)
from controller.cli.output import (
    DOCUMENTS,
    TABLES,
    Column,
    Listing,
    Output,
    OutputOption,
    fit_table,
    optional_column,
    plain_values,
    print_change,
    print_error,
    print_line,
    print_list,
)
from controller.util.text import to_printable

if TYPE_CHECKING:
    import grpc
    from rich.console import Console, RenderableType
    from rich.text import Text

    from speculation.v1 import service_pb2

    Answer = TypeVar("Answer", service_pb2.OverviewResponse, service_pb2.ListFleetResponse)
else:
    Answer = TypeVar("Answer")

_ANSWER_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class _View(Generic[Answer]):
    """Describes what `top` shows.

    fetch: calls the sidecar; raises grpc.RpcError.  header_line, footer_lines: lines above and
    below the table. footer_style: style of the lines below.  print_answer: prints an answer.
    document: an answer as plain values.
    """

    fetch: "Callable[[grpc.Channel], Answer]"
    listing: Listing[Any]
    header_line: Callable[[Answer], str]
    footer_lines: Callable[[Answer], list[str]]
    print_answer: Callable[[Answer, Output], None]
    document: Callable[[Answer], dict[str, Any]]
    footer_style: str = ""


def top(
    address: Address = DEFAULT_ADDRESS,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    fleet: FleetOption = False,
    words: FilterOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the state of all engines live, until Ctrl-C.

    Into a pipe or a file it writes one plain table per update.  If the sidecar goes away, it waits
    for the sidecar to return.  -o json prints one line per update, and -o yaml a stream of
    documents; wide and name need --once.
    """
    if not once and output in {Output.WIDE, Output.NAME}:
        raise typer.BadParameter(f"-o {output} needs --once")
    require_fleet(fleet=fleet, filter_text=words)
    if fleet:
        _show_view(_fleet_view(words), address, interval, output, once=once)
    else:
        _show_view(_SIDECAR, address, interval, output, once=once)


def _fleet_view(filter_text: str) -> "_View[service_pb2.ListFleetResponse]":
    return _View(
        lambda channel: read_fleet(channel, filter_text),
        FLEET,
        header_line,
        footer_lines,
        show_fleet,
        fleet_document,
    )


def _show_view(
    view: _View[Answer], address: str, interval: float, output: Output, *, once: bool
) -> None:
    with open_connection(address) as channel:
        answer = view.fetch(channel)
    if once:
        _print_answer(view, answer, output)
        return
    with contextlib.suppress(KeyboardInterrupt), open_connection(address):
        if output in DOCUMENTS:
            _print_stream(view, _poll(view, address, interval, answer), output)
        else:
            _show_live(view, address, interval, answer)


def _print_stream(
    view: _View[Answer], answers: Iterator[tuple[Answer, str]], output: Output
) -> None:
    """Prints a document for every answer."""
    last_trouble = ""
    for answer, trouble in answers:
        if not trouble:
            print_change(view.listing.kind, view.document(answer), output, "")
        elif trouble != last_trouble:
            print_error(f"controller top: {trouble}")
        last_trouble = trouble


def _show_live(view: _View[Answer], address: str, interval: float, answer: Answer) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for view_answer, trouble in _poll(view, address, interval, answer):
            _print_answer(view, view_answer, Output.TABLE, trouble)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for view_answer, trouble in _poll(view, address, interval, answer):
            live.update(_render_screen(view, view_answer, console, trouble), refresh=True)


def _poll(
    view: _View[Answer], address: str, interval: float, answer: Answer
) -> Iterator[tuple[Answer, str]]:
    """Yields the newest answer, and what is wrong with it ("": nothing), without an end.

    A channel that lost its sidecar is given up: it would wait ever longer before it tries again.
    """
    import grpc

    yield answer, ""
    trouble, channel = "", open_channel(address)
    try:
        while True:
            time.sleep(interval)
            try:
                answer, trouble = view.fetch(channel), ""
            except grpc.RpcError as error:
                if not is_unreachable(error):
                    raise
                trouble = trouble or (
                    f"no sidecar answers at {address} since {time.strftime('%H:%M:%S')}: waiting "
                    "for it"
                )
                channel.close()
                channel = open_channel(address)
            yield answer, trouble
    finally:
        channel.close()


def _overview(channel: "grpc.Channel") -> "service_pb2.OverviewResponse":
    from controller.client.paging import collect_request_pages
    from speculation.v1 import service_pb2, service_pb2_grpc

    overview = service_pb2_grpc.InspectionServiceStub(channel).Overview
    return collect_request_pages(
        partial(overview, timeout=_ANSWER_SECONDS_MAX), service_pb2.OverviewRequest()
    )


def _render_screen(
    view: _View[Answer], answer: Answer, console: "Console", trouble: str = ""
) -> "RenderableType":
    from rich.console import Group

    table, left_out = fit_table(
        view.listing, answer.engines, console, style="dim" if trouble else ""
    )
    left_out_lines = [_safe_text(f"left out: {', '.join(left_out)}", "dim")] if left_out else []
    return Group(
        _safe_text(view.header_line(answer)),
        *([_safe_text(trouble, "bold red")] if trouble else []),
        table,
        *left_out_lines,
        *(_safe_text(line, view.footer_style) for line in view.footer_lines(answer)),
    )


def _print_answer(view: _View[Answer], answer: Answer, output: Output, trouble: str = "") -> None:
    """Prints an answer; the line above the table is printed for people only."""
    if output in TABLES:
        print_line(view.header_line(answer))
        if trouble:
            print_line(trouble)
    view.print_answer(answer, output)


def _print_engines(answer: "service_pb2.OverviewResponse", output: Output) -> None:
    print_list(ENGINES, answer.engines, output, "no engine has introduced itself")
    if output in TABLES:
        for line in _trouble_lines(answer):
            print_line(line)


def _document(answer: "service_pb2.OverviewResponse") -> dict[str, Any]:
    return {"items": [plain_values(line) for line in answer.engines]}


def _header_line(answer: "service_pb2.OverviewResponse") -> str:
    clock = time.strftime("%H:%M:%S")
    return f"controller {answer.version}  {clock}  engines: {len(answer.engines)}"


def _trouble_lines(answer: "service_pb2.OverviewResponse") -> list[str]:
    return [
        f"{line.engine_id}: {trouble}"
        for line in answer.engines
        for trouble in (*line.lost, *line.warnings)
    ]


ENGINES: "Listing[service_pb2.EngineOverview]" = Listing(
    "EngineOverviewList",
    lambda line: line.engine_id,
    (
        Column("engine", lambda line: line.engine_id, style=lambda _: "bold"),
        Column("B", lambda line: str(line.batch_size or "-"), is_right_aligned=True),
        Column(
            "γ", lambda line: str(line.gamma), is_right_aligned=True, style=lambda _: "bold cyan"
        ),
        Column("drafter", lambda line: line.drafter, priority=1),
        optional_column("τ", "accept_length", "{:.2f}", priority=2),
        optional_column("tokens/s", "tokens_per_second", "{:.0f}", priority=3),
        optional_column("gain", "gain", "x{:.2f}", priority=2),
        Column("regime", lambda line: line.regime, priority=6),
        Column("reason", lambda line: line.reason, priority=4),
        Column(
            "plan age", lambda line: f"{line.plan_age_seconds:.0f} s", is_right_aligned=True,
            priority=7
        ),
        Column("link", lambda line: line.link, priority=1, style=lambda link: LINKS.get(link, "")),
        Column("overrides", lambda line: ", ".join(line.overrides) or "-", priority=5),
    ),
    plain_values,
    lambda line: line.unavailable,
)  # fmt: skip


_SIDECAR: "_View[service_pb2.OverviewResponse]" = _View(
    _overview, ENGINES, _header_line, _trouble_lines, _print_engines, _document, footer_style="red"
)


def _safe_text(text: str, style: str = "") -> "Text":
    """Returns text without terminal control characters, since engines supply parts of it."""
    from rich.text import Text

    return Text(to_printable(text), style)
