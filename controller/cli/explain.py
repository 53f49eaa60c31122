"""`controller engines` and `controller explain`: what a running sidecar knows."""

from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.completion import engine_ids
from controller.cli.connection import DEFAULT_ADDRESS, UINT32_MAX, Address, connected
from controller.cli.fleet import (
    FilterOption,
    FleetOption,
    fleet_of,
    require_fleet,
    show_fleet,
)
from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    plain_values,
    print_line,
    print_words,
    show,
    show_one,
)
from controller.cli.plan_words import health_text, lost_text, row_for
from controller.wire.override_text import reason_text

if TYPE_CHECKING:
    from speculation.v1 import service_pb2

_ANSWER_SECONDS_MAX = 5.0


def engines(
    output: OutputOption = Output.TABLE,
    fleet: FleetOption = False,
    words: FilterOption = "",
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Lists the engines that the sidecar steers, or, with --fleet, those of all sidecars."""
    from controller.client.paging import every_page
    from speculation.v1 import service_pb2, service_pb2_grpc

    require_fleet(fleet=fleet, words=words)
    with connected(address) as channel:
        if fleet:
            show_fleet(fleet_of(channel, words), output)
            return
        inspection = service_pb2_grpc.InspectionServiceStub(channel)
        answer = every_page(
            lambda token: inspection.ListEngines(
                service_pb2.ListEnginesRequest(page_token=token), timeout=_ANSWER_SECONDS_MAX
            )
        )
    show(_ENGINES, answer.engines, output, "no engine has introduced itself")
    if output not in {Output.TABLE, Output.WIDE}:
        return
    for status in answer.engines:
        for line in lost_text(status.engine.lost).splitlines():
            print_line(f"{status.engine.engine_id}: {line}")
    for line in health_text(answer.sidecar.services).splitlines():
        print_line(line)


def explain(
    engine: Annotated[
        str,
        typer.Argument(
            help="Engine id, as `controller engines` lists it.", autocompletion=engine_ids
        ),
    ],
    batch_size: Annotated[
        int,
        typer.Option(
            min=0, max=UINT32_MAX, help="Batch size to explain; 0: that of the last report."
        ),
    ] = 0,
    short: Annotated[bool, typer.Option("--short", help="One line.")] = False,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="All numbers: every choice, every estimate.")
    ] = False,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Tells in a paragraph why an engine runs the draft length that it runs.

    With --short in one line, with --numbers (or -o wide) with all numbers. JSON and YAML always
    have all numbers.
    """
    from controller.cli.explain_numbers import print_numbers
    from controller.cli.explain_words import line_text, paragraph_text
    from speculation.v1 import service_pb2, service_pb2_grpc

    if short and numbers:
        raise typer.BadParameter("--short and --numbers contradict each other")
    with connected(address) as channel:
        answer = service_pb2_grpc.InspectionServiceStub(channel).Explain(
            service_pb2.ExplainRequest(engine_id=engine, batch_size=batch_size),
            timeout=_ANSWER_SECONDS_MAX,
        )

    def tell() -> None:
        if short:
            print_words(line_text(answer))
        elif numbers or output is Output.WIDE:
            print_numbers(answer, wide=output is Output.WIDE)
        else:
            print_words(paragraph_text(answer))

    show_one("Explanation", plain_values(answer), output, [answer.engine_id], tell)


def _last_size(status: "service_pb2.EngineStatus") -> int:
    return status.last_report.batch_size if status.HasField("last_report") else 0


def _planned(status: "service_pb2.EngineStatus") -> str:
    row = row_for(status.plan, _last_size(status) or 1)
    return f"{row.drafter} {row.gamma}"


def _last_report(status: "service_pb2.EngineStatus") -> str:
    return f"{status.seconds_since_last_report:.1f} s ago" if _last_size(status) else "never"


_ENGINES: "Listing[service_pb2.EngineStatus]" = Listing(
    "EngineStatusList",
    lambda status: status.engine.engine_id,
    (
        Column("engine", lambda status: status.engine.engine_id),
        Column("profile", lambda status: status.profile_id or "none (prior)", priority=3),
        Column("B", lambda status: str(_last_size(status) or "-"), right=True),
        Column("gamma", _planned),
        Column("reason", lambda status: reason_text(status.plan), priority=1),
        Column("reports", lambda status: str(status.reports), right=True, priority=4),
        Column("rejected", lambda status: str(status.rejected_reports), right=True, priority=5),
        Column("dropped", lambda status: str(status.dropped_reports), right=True, priority=5),
        Column("last report", _last_report, right=True, priority=2),
    ),
    plain_values,
    lambda status: status.unavailable,
)
