"""Implements `controller top`: the engines of a running sidecar, live."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.connection import (
    DEFAULT_ADDRESS,
    Address,
    connected,
    is_away,
    open_channel,
    print_wide,
)

if TYPE_CHECKING:
    import grpc
    from rich.console import RenderableType
    from rich.text import Text

    from speculation.v1 import service_pb2

_ANSWER_SECONDS_MAX = 5.0
_LINKS = {"steered": "green", "alone": "red", "away": "yellow"}


def top(
    address: Address = DEFAULT_ADDRESS,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
) -> None:
    """Shows the engines as they are steered, until Ctrl-C.

    Into a pipe or a file it writes one plain table a look.  A sidecar that goes away is waited for.
    """
    with connected(address) as channel:
        answer = _overview(channel)
    if once:
        print_wide(_screen(answer))
        return
    with contextlib.suppress(KeyboardInterrupt), connected(address):
        _watch(address, interval, answer)


def _watch(address: str, interval: float, answer: "service_pb2.OverviewResponse") -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for found, trouble in _looks(address, interval, answer):
            print_wide(_screen(found, trouble))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for found, trouble in _looks(address, interval, answer):
            live.update(_screen(found, trouble), refresh=True)


def _looks(
    address: str, interval: float, answer: "service_pb2.OverviewResponse"
) -> "Iterator[tuple[service_pb2.OverviewResponse, str]]":
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
                answer, trouble = _overview(channel), ""
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
    from controller.client.paging import every_engine
    from speculation.v1 import service_pb2, service_pb2_grpc

    inspection = service_pb2_grpc.InspectionServiceStub(channel)
    return every_engine(
        lambda token: inspection.Overview(
            service_pb2.OverviewRequest(page_token=token), timeout=_ANSWER_SECONDS_MAX
        )
    )


def _screen(answer: "service_pb2.OverviewResponse", trouble: str = "") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table

    table = Table(
        "engine", "B", "γ", "drafter", "τ", "tokens/s", "gain", "regime", "reason", "plan age",
        "link", "overrides", style="dim" if trouble else "",
    )  # fmt: skip
    for number in (1, 2, 4, 5, 6, 9):
        table.columns[number].justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for line in answer.engines:
        table.add_row(*_cells(line))
    head = (
        f"controller {answer.version}  {time.strftime('%H:%M:%S')}  engines: {len(answer.engines)}"
    )
    lost = [
        _text(f"{line.engine_id}: {loss}", "red") for line in answer.engines for loss in line.lost
    ]
    return Group(_text(head), *([_text(trouble, "bold red")] if trouble else []), table, *lost)


def _cells(line: "service_pb2.EngineOverview") -> "list[Text]":
    if line.unavailable:
        return [_text(line.engine_id, "bold"), *[_text("-")] * 7, _text(line.unavailable, "red")]
    return [
        _text(line.engine_id, "bold"),
        _text(str(line.batch_size or "-")),
        _text(str(line.gamma), "bold cyan"),
        _text(line.drafter),
        _text(f"{line.accept_length:.2f}" if line.HasField("accept_length") else "-"),
        _text(f"{line.tokens_per_second:.0f}" if line.HasField("tokens_per_second") else "-"),
        _text(f"x{line.gain:.2f}" if line.HasField("gain") else "-"),
        _text(line.regime),
        _text(line.reason),
        _text(f"{line.plan_age_seconds:.0f} s"),
        _text(line.link, _LINKS.get(line.link, "")),
        _text(", ".join(line.overrides) or "-"),
    ]


def _text(words: str, style: str = "") -> "Text":
    """Words of others, which may not command the terminal."""
    from rich.text import Text

    return Text(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words), style
    )
