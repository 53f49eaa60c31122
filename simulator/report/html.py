"""A report as one self-contained page, printable, with plots as inline SVG drawn by matplotlib."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from controller.recording.html_page import (
    Cell,
    HighlightedCell,
    html_document,
    html_table,
    inline_svg,
    new_figure,
)
from simulator.report import text
from simulator.report.bars import OURS, find_controller_report, is_peer, judge_bars
from simulator.results import ScenarioReport, SimulationReport, Timeline


def render_html(report: SimulationReport) -> str:
    """Renders the page.  Raises MissingPlotsError when matplotlib is not installed."""
    return html_document("controller simulate", "\n".join(_body(report)))


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
    if any(map(find_controller_report, report.scenarios)):
        yield "<h2>Bars</h2>"
        yield _table(
            ("demand", "wanted", "found", "", "where"),
            [
                (bar.name, f"{bar.required:g}", f"{bar.value:.4g}",
                 HighlightedCell(*(("good", "holds") if bar.holds else ("bad", "missed"))),
                 bar.worst_scenario)
                for bar in judge_bars(report)
            ],
        )  # fmt: skip
        yield "<h2>Overview</h2>"
        yield overview_plot(report)
        yield stationary_plot(report)
        yield _table(
            text.OVERVIEW_COLUMNS, [row for _, row in text.overview_rows(report.scenarios)]
        )
    yield "<h2>Scenarios</h2>"
    yield from map(_scenario_section, report.scenarios)


def _scenario_section(scenario: ScenarioReport) -> str:
    rows = [text.scenario_row(p, intervals=True) for p in scenario.policies]
    extra_tables = ""
    if latencies := text.latency_rows(scenario):
        extra_tables += "<p class=small>Latency: mean / median / 99th percentile.</p>"
        extra_tables += _table(text.LATENCY_COLUMNS, latencies)
    if loads := text.sustained_rows(scenario.sustained):
        extra_tables += "<p class=small>Highest load within the latency bound.</p>"
        extra_tables += _table(text.SUSTAINED_COLUMNS, loads)
    plot = timeline_plot(scenario.timeline) if scenario.timeline is not None else ""
    return (
        f"<details><summary>{escape(scenario.name)}</summary>"
        f"<p class=small>{escape(scenario.description)}; {scenario.steps} steps, "
        f"{scenario.seeds} seeds, best static arm {escape(scenario.best_static)}</p>"
        f"{_table(text.SCENARIO_COLUMNS, rows)}{extra_tables}{plot}</details>"
    )


def _table(head: Iterable[str], rows: Sequence[Sequence[Cell]]) -> str:
    return html_table(list(head), rows, marked=[row[0] == OURS for row in rows])


_OURS_COLOUR, _ORACLE_COLOUR = "#0b6e4f", "#c8553d"
_PEER_COLOURS = ("#4062bb", "#e0a030", "#8d5a97", "#59a5d8", "#7a7a7a", "#b8c04a", "#d98c8c")
_STATIONARY_NAME = re.compile(r"stationary/(?P<cost>[^/]+)/(?P<kind>[^/]+)/B=(?P<batch>\d+)")


def overview_plot(report: SimulationReport) -> str:
    """Plots the ratio to the oracle of the controller and every peer, one line per scenario."""
    scenarios = [s for s in report.scenarios if s.shifting] or list(report.scenarios[:40])
    names = list(dict.fromkeys(p.name for s in scenarios for p in s.policies if is_peer(p)))
    figure = new_figure(9.5, 1.2 + 0.27 * len(scenarios))
    axes = figure.subplots()
    rows = np.arange(len(scenarios))
    for colour, name in zip(_PEER_COLOURS, names, strict=False):
        points = [
            next((p.ratio_to_oracle for p in s.policies if p.name == name), np.nan)
            for s in scenarios
        ]
        axes.scatter(points, rows, s=22, color=colour, label=name, alpha=0.85)
    controller_ratios = [
        next((p.ratio_to_oracle for p in s.policies if p.name == OURS), np.nan) for s in scenarios
    ]
    axes.scatter(
        controller_ratios, rows, s=46, color=_OURS_COLOUR, marker="D", label=OURS, zorder=3
    )
    axes.axvline(1.0, color=_ORACLE_COLOUR, linewidth=1, linestyle="--")
    axes.set_yticks(rows, [s.name for s in scenarios], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("score, relative to the oracle")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.08 - 0.6 / len(scenarios)),
                ncols=4, frameon=False)  # fmt: skip
    return inline_svg(figure, "ratio to the oracle by scenario and policy")


def stationary_plot(report: SimulationReport) -> str:
    """Plots the controller's ratio to the oracle by cost, acceptance and batch; "" for none."""
    cells = {
        (cell_match["cost"], cell_match["kind"], int(cell_match["batch"])): p.ratio_to_oracle
        for s in report.scenarios
        for p in s.policies
        if p.name == OURS and (cell_match := _STATIONARY_NAME.fullmatch(s.name))
    }
    if not cells:
        return ""
    rows = list(dict.fromkeys((cost, kind) for cost, kind, _ in cells))
    columns = sorted({batch for _, _, batch in cells})
    ratios = np.array([[cells.get((*row, b), np.nan) for b in columns] for row in rows])
    figure = new_figure(9.5, 1.0 + 0.27 * len(rows))
    axes = figure.subplots()
    image = axes.imshow(ratios, aspect="auto", vmin=0.97, vmax=1.01, cmap="RdYlGn")
    for (i, j), value in np.ndenumerate(ratios):
        if np.isfinite(value):
            axes.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(columns)), [f"B = {b}" for b in columns])
    axes.set_yticks(range(len(rows)), [f"{cost}, {kind}" for cost, kind in rows], fontsize=8)
    figure.colorbar(image, ax=axes, label="controller / oracle, stationary", shrink=0.6)
    return inline_svg(figure, "stationary cells: controller over oracle")


def timeline_plot(timeline: Timeline) -> str:
    """Plots batch size, draft length and rate over virtual time, with the oracle's."""
    figure = new_figure(9.5, 5.0)
    batch, gamma, rate = figure.subplots(3, 1, sharex=True)
    batch.step(timeline.seconds, timeline.batch_size, color="#555555", where="pre")
    batch.set_ylabel("batch size")
    gamma.step(timeline.oracle_seconds, timeline.oracle_gamma, color=_ORACLE_COLOUR, where="pre",
               label="oracle", alpha=0.8)  # fmt: skip
    gamma.step(timeline.seconds, timeline.gamma, color=_OURS_COLOUR, where="pre", label=OURS)
    gamma.set_ylabel("draft length")
    gamma.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    rate.plot(timeline.oracle_seconds, timeline.oracle_rate, color=_ORACLE_COLOUR, alpha=0.8)
    rate.plot(timeline.seconds, timeline.rate, color=_OURS_COLOUR)
    rate.set_ylabel("tokens/s")
    rate.set_xlabel("virtual seconds")
    for axes in (batch, gamma, rate):
        axes.grid(alpha=0.3)
    return inline_svg(figure, "batch size, draft length and rate over time")
