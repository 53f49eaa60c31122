"""A report as one self-contained page: no script, no network, light and dark, printable."""

from collections.abc import Iterator, Sequence
from html import escape

from controller.recording.html_page import Cell, Marked, page, table
from simulator.report.bars import OURS, bars, ours
from simulator.report.plots import overview_plot, stationary_plot, timeline_plot
from simulator.report.rows import (
    LATENCY_COLUMNS,
    OVERVIEW_COLUMNS,
    SCENARIO_COLUMNS,
    SUSTAINED_COLUMNS,
    latency_rows,
    overview_rows,
    scenario_row,
    sustained_rows,
)
from simulator.results import ScenarioReport, SimulationReport


def render_html(report: SimulationReport) -> str:
    """Renders the page.  Raises MissingPlotsError when matplotlib is not installed."""
    return page("controller simulate", "\n".join(_body(report)))


def _body(report: SimulationReport) -> Iterator[str]:
    yield "<h1>How far should an engine speculate? The controller against everything else</h1>"
    yield (
        f"<p class=small><code>{escape(report.command)}</code><br>version "
        f"{escape(report.version)}, seed {report.seed}, {len(report.scenarios)} scenarios in "
        f"{report.wall_seconds:.0f} s. Virtual time; every policy met the same requests, the same "
        "acceptance at the same position and the same noise. Ratios are geometric means over "
        "paired seeds, with 95 % intervals: of tokens per second or, where requests arrive by "
        "themselves, of the inverse of the mean latency per token. vllm-schedule is given its best "
        "table in hindsight.</p>"
    )
    if any(map(ours, report.scenarios)):
        yield "<h2>Bars</h2>"
        yield _table(
            ("demand", "wanted", "found", "", "where"),
            [
                (bar.name, f"{bar.wanted:g}", f"{bar.found:.4g}",
                 Marked("good", "holds") if bar.holds else Marked("bad", "missed"), bar.where)
                for bar in bars(report)
            ],
        )  # fmt: skip
        yield "<h2>Overview</h2>"
        yield overview_plot(report)
        yield stationary_plot(report)
        yield _table(OVERVIEW_COLUMNS, [row for _, row in overview_rows(report.scenarios)])
    yield "<h2>Scenarios</h2>"
    yield from map(_scenario, report.scenarios)


def _scenario(scenario: ScenarioReport) -> str:
    rows = [scenario_row(p, intervals=True) for p in scenario.policies]
    more = ""
    if latencies := latency_rows(scenario):
        more += "<p class=small>Latency: mean / median / 99th percentile.</p>"
        more += _table(LATENCY_COLUMNS, latencies)
    if loads := sustained_rows(scenario.sustained):
        more += "<p class=small>Highest load within the latency bound.</p>"
        more += _table(SUSTAINED_COLUMNS, loads)
    plot = timeline_plot(scenario.timeline) if scenario.timeline is not None else ""
    return (
        f"<details><summary>{escape(scenario.name)}</summary>"
        f"<p class=small>{escape(scenario.description)}; {scenario.steps} steps, "
        f"{scenario.seeds} seeds, best static arm {escape(scenario.best_static)}</p>"
        f"{_table(SCENARIO_COLUMNS, rows)}{more}{plot}</details>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    return table(head, rows, marked=[row[0] == OURS for row in rows])
