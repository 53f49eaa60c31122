"""Implements `controller top`: the engines of a running sidecar, live."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from controller.cli.connection import DEFAULT_ADDRESS, Address, connected, is_away, open_channel
from controller.cli.fleet import (
    FLEET,
    LINKS,
    FilterOption,
    FleetOption,
    document,
    fleet_of,
    foot,
    head,
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
    fitting_table,
    optional_column,
    plain_values,
    print_error,
    print_line,
    show,
    show_news,
)
from controller.util.text import printable

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

    ask: calls the sidecar; raises grpc.RpcError.  head, foot: lines above and below the table.
    foot_style: style of the lines below.  print: prints an answer.  document: an answer as plain
    values.
    """

    ask: "Callable[[grpc.Channel], Answer]"
    listing: Listing[Any]
    head: Callable[[Answer], str]
    foot: Callable[[Answer], list[str]]
    print: Callable[[Answer, Output], None]
    document: Callable[[Answer], dict[str, Any]]
    foot_style: str = ""


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
    require_fleet(fleet=fleet, words=words)
    if fleet:
        _show(_fleet_view(words), address, interval, output, once=once)
    else:
        _show(_SIDECAR, address, interval, output, once=once)


def _fleet_view(words: str) -> "_View[service_pb2.ListFleetResponse]":
    return _View(lambda channel: fleet_of(channel, words), FLEET, head, foot, show_fleet, document)


def _show(
    view: _View[Answer], address: str, interval: float, output: Output, *, once: bool
) -> None:
    with connected(address) as channel:
        answer = view.ask(channel)
    if once:
        _print(view, answer, output)
        return
    with contextlib.suppress(KeyboardInterrupt), connected(address):
        if output in DOCUMENTS:
            _stream(view, _looks(view, address, interval, answer), output)
        else:
            _watch(view, address, interval, answer)


def _stream(view: _View[Answer], looks: Iterator[tuple[Answer, str]], output: Output) -> None:
    """Prints a document for every answer."""
    known = ""
    for found, trouble in looks:
        if not trouble:
            show_news(view.listing.kind, view.document(found), output, "")
        elif trouble != known:
            print_error(f"controller top: {trouble}")
        known = trouble


def _watch(view: _View[Answer], address: str, interval: float, answer: Answer) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for found, trouble in _looks(view, address, interval, answer):
            _print(view, found, Output.TABLE, trouble)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for found, trouble in _looks(view, address, interval, answer):
            live.update(_screen(view, found, console, trouble), refresh=True)


def _looks(
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
                answer, trouble = view.ask(channel), ""
            except grpc.RpcError as error:
                if not is_away(error):
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
    from controller.client.paging import every_page_of
    from speculation.v1 import service_pb2, service_pb2_grpc

    overview = service_pb2_grpc.InspectionServiceStub(channel).Overview
    return every_page_of(
        partial(overview, timeout=_ANSWER_SECONDS_MAX), service_pb2.OverviewRequest()
    )


def _screen(
    view: _View[Answer], answer: Answer, console: "Console", trouble: str = ""
) -> "RenderableType":
    from rich.console import Group

    table, left_out = fitting_table(
        view.listing, answer.engines, console, style="dim" if trouble else ""
    )
    more = [_text(f"left out: {', '.join(left_out)}", "dim")] if left_out else []
    return Group(
        _text(view.head(answer)),
        *([_text(trouble, "bold red")] if trouble else []),
        table,
        *more,
        *(_text(line, view.foot_style) for line in view.foot(answer)),
    )


def _print(view: _View[Answer], answer: Answer, output: Output, trouble: str = "") -> None:
    """Prints an answer; the line above the table is printed for people only."""
    if output in TABLES:
        print_line(view.head(answer))
        if trouble:
            print_line(trouble)
    view.print(answer, output)


def _print_engines(answer: "service_pb2.OverviewResponse", output: Output) -> None:
    show(ENGINES, answer.engines, output, "no engine has introduced itself")
    if output in TABLES:
        for line in _losses(answer):
            print_line(line)


def _document(answer: "service_pb2.OverviewResponse") -> dict[str, Any]:
    return {"items": [plain_values(line) for line in answer.engines]}


def _head(answer: "service_pb2.OverviewResponse") -> str:
    clock = time.strftime("%H:%M:%S")
    return f"controller {answer.version}  {clock}  engines: {len(answer.engines)}"


def _losses(answer: "service_pb2.OverviewResponse") -> list[str]:
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
        Column("B", lambda line: str(line.batch_size or "-"), right=True),
        Column("γ", lambda line: str(line.gamma), right=True, style=lambda _: "bold cyan"),
        Column("drafter", lambda line: line.drafter, priority=1),
        optional_column("τ", "accept_length", "{:.2f}", priority=2),
        optional_column("tokens/s", "tokens_per_second", "{:.0f}", priority=3),
        optional_column("gain", "gain", "x{:.2f}", priority=2),
        Column("regime", lambda line: line.regime, priority=6),
        Column("reason", lambda line: line.reason, priority=4),
        Column("plan age", lambda line: f"{line.plan_age_seconds:.0f} s", right=True, priority=7),
        Column("link", lambda line: line.link, priority=1, style=lambda link: LINKS.get(link, "")),
        Column("overrides", lambda line: ", ".join(line.overrides) or "-", priority=5),
    ),
    plain_values,
    lambda line: line.unavailable,
)  # fmt: skip


_SIDECAR: "_View[service_pb2.OverviewResponse]" = _View(
    _overview, ENGINES, _head, _losses, _print_engines, _document, foot_style="red"
)


def _text(words: str, style: str = "") -> "Text":
    """Returns text without terminal control characters, since engines supply parts of it."""
    from rich.text import Text

    return Text(printable(words), style)
