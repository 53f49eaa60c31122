"""A report as tables for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.simulation.report.bars import OURS, bars, ours
from controller.simulation.report.rows import (
    LATENCY_COLUMNS,
    OVERVIEW_COLUMNS,
    SCENARIO_COLUMNS,
    SUSTAINED_COLUMNS,
    latency_rows,
    overview_rows,
    scenario_row,
    sustained_rows,
)
from controller.simulation.results import ScenarioReport, SimulationReport

# So many scenarios are shown policy by policy; more are shown in the overview alone.
_DETAILED = 6


def render_text(report: SimulationReport) -> Group:
    """Shows overview and bars; with a few scenarios also every policy of each."""
    return Group(*_parts(report))


def _parts(report: SimulationReport) -> Iterator[RenderableType]:
    if not report.scenarios:
        yield Text("no scenario was run")
        return
    if len(report.scenarios) <= _DETAILED:
        for scenario in report.scenarios:
            yield scenario_table(scenario)
            if rows := latency_rows(scenario):
                title = f"{scenario.name}: latency, mean / median / 99th percentile"
                yield _plain_table(title, LATENCY_COLUMNS, rows)
    for scenario in report.scenarios:
        if rows := sustained_rows(scenario.sustained):
            title = f"{scenario.name}: highest load within the latency bound"
            yield _plain_table(title, SUSTAINED_COLUMNS, rows)
    if any(map(ours, report.scenarios)):
        yield overview_table(report)
        yield bars_table(report)
    yield Text(
        f"{len(report.scenarios)} scenarios in {report.wall_seconds:.0f} s, seed {report.seed}. "
        "Ratios are geometric means over paired seeds, of tokens per second or, where requests "
        "arrive by themselves, of the inverse of the mean latency per token; vllm-schedule has its "
        "best table in hindsight."
    )


def scenario_table(scenario: ScenarioReport) -> Table:
    """Makes one row for each policy, the best first."""
    table = Table(title=f"{scenario.name}: {scenario.description}", title_justify="left")
    for column in SCENARIO_COLUMNS[:2]:
        table.add_column(column, no_wrap=True)
    for column in SCENARIO_COLUMNS[2:]:
        table.add_column(column, justify="right")
    for policy in scenario.policies:
        row = scenario_row(policy, intervals=False)
        table.add_row(*row, style="bold" if policy.name == OURS else "")
    return table


def _plain_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == OURS else "")
    return table


def overview_table(report: SimulationReport) -> Table:
    """Makes one row for each scenario: the controller against everything."""
    table = Table(title="controller", title_justify="left")
    for column in (*OVERVIEW_COLUMNS, "us"):
        if column == "scenario":
            table.add_column(column, overflow="fold")
        elif column == "closest peer":
            table.add_column(column)
        else:
            table.add_column(
                column, justify="right", no_wrap=column in {"of oracle", "of best static", "of off"}
            )
    for policy, row in overview_rows(report.scenarios):
        table.add_row(*row, f"{policy.decision_microseconds:.0f}")
    return table


def bars_table(report: SimulationReport) -> Table:
    """Shows the demands, and whether they hold."""
    table = Table(title="bars", title_justify="left")
    table.add_column("demand")
    table.add_column("wanted", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    table.add_column("where", overflow="fold")
    for bar in bars(report):
        holds = Text("holds", style="green") if bar.holds else Text("missed", style="red")
        table.add_row(bar.name, f"{bar.wanted:g}", f"{bar.found:.4g}", holds, bar.where)
    return table
