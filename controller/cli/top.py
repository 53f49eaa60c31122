"""Implements `controller top`: the engines of a running sidecar, live."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from controller.cli.connection import DEFAULT_ADDRESS, Address, connected, is_away, open_channel
from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    fitting_table,
    plain_values,
    printable,
    show,
)

if TYPE_CHECKING:
    import grpc
    from rich.console import Console, RenderableType
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
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the engines as they are steered, until Ctrl-C.

    Into a pipe or a file it writes one plain table a look.  A sidecar that goes away is waited for.
    Other forms than a table need --once.
    """
    if not once and output is not Output.TABLE:
        raise typer.BadParameter(f"-o {output} shows one look: add --once")
    with connected(address) as channel:
        answer = _overview(channel)
    if once:
        _print(answer, output)
        return
    with contextlib.suppress(KeyboardInterrupt), connected(address):
        _watch(address, interval, answer)


def _watch(address: str, interval: float, answer: "service_pb2.OverviewResponse") -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        for found, trouble in _looks(address, interval, answer):
            _print(found, Output.TABLE, trouble)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for found, trouble in _looks(address, interval, answer):
            live.update(_screen(found, console, trouble), refresh=True)


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
    from controller.client.paging import every_page
    from speculation.v1 import service_pb2, service_pb2_grpc

    inspection = service_pb2_grpc.InspectionServiceStub(channel)
    return every_page(
        lambda token: inspection.Overview(
            service_pb2.OverviewRequest(page_token=token), timeout=_ANSWER_SECONDS_MAX
        )
    )


def _screen(
    answer: "service_pb2.OverviewResponse", console: "Console", trouble: str = ""
) -> "RenderableType":
    from rich.console import Group

    table, left_out = fitting_table(
        ENGINES, answer.engines, console, style="dim" if trouble else ""
    )
    more = [_text(f"left out: {', '.join(left_out)}", "dim")] if left_out else []
    lost = [_text(line, "red") for line in _losses(answer)]
    return Group(
        _text(_head(answer)),
        *([_text(trouble, "bold red")] if trouble else []),
        table,
        *more,
        *lost,
    )


def _print(answer: "service_pb2.OverviewResponse", output: Output, trouble: str = "") -> None:
    """Prints one look; everything but the engines is for tables only."""
    if output not in {Output.TABLE, Output.WIDE}:
        show(ENGINES, answer.engines, output)
        return
    print(printable(_head(answer)))
    if trouble:
        print(printable(trouble))
    show(ENGINES, answer.engines, output, "no engine has introduced itself")
    for line in _losses(answer):
        print(printable(line))


def _head(answer: "service_pb2.OverviewResponse") -> str:
    clock = time.strftime("%H:%M:%S")
    return f"controller {answer.version}  {clock}  engines: {len(answer.engines)}"


def _losses(answer: "service_pb2.OverviewResponse") -> list[str]:
    return [f"{line.engine_id}: {loss}" for line in answer.engines for loss in line.lost]


def _optional(
    line: "service_pb2.EngineOverview",
    name: Literal["accept_length", "tokens_per_second", "gain"],
    form: str,
) -> str:
    return form.format(getattr(line, name)) if line.HasField(name) else "-"


ENGINES: "Listing[service_pb2.EngineOverview]" = Listing(
    "EngineOverviewList",
    lambda line: line.engine_id,
    (
        Column("engine", lambda line: line.engine_id, style=lambda _: "bold"),
        Column("B", lambda line: str(line.batch_size or "-"), right=True),
        Column("γ", lambda line: str(line.gamma), right=True, style=lambda _: "bold cyan"),
        Column("drafter", lambda line: line.drafter, priority=1),
        Column(
            "τ", lambda line: _optional(line, "accept_length", "{:.2f}"), right=True, priority=2
        ),
        Column(
            "tokens/s", lambda line: _optional(line, "tokens_per_second", "{:.0f}"), right=True,
            priority=3,
        ),
        Column("gain", lambda line: _optional(line, "gain", "x{:.2f}"), right=True, priority=2),
        Column("regime", lambda line: line.regime, priority=6),
        Column("reason", lambda line: line.reason, priority=4),
        Column("plan age", lambda line: f"{line.plan_age_seconds:.0f} s", right=True, priority=7),
        Column("link", lambda line: line.link, priority=1, style=lambda link: _LINKS.get(link, "")),
        Column("overrides", lambda line: ", ".join(line.overrides) or "-", priority=5),
    ),
    plain_values,
    lambda line: line.unavailable,
)  # fmt: skip


def _text(words: str, style: str = "") -> "Text":
    """Words of others, which may not command the terminal."""
    from rich.text import Text

    return Text(printable(words), style)
