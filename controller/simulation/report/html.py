"""A report as one self-contained page: no script, no network, light and dark, printable."""

from collections.abc import Iterator, Sequence
from html import escape

from controller.report.page import Cell, Marked, page, table
from controller.simulation.report.bars import OURS, bars, best_peer
from controller.simulation.report.plots import overview_plot, stationary_plot, timeline_plot
from controller.simulation.report.text import ratio
from controller.simulation.results import PolicyReport, ScenarioReport, SimulationReport


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
        "paired seeds, with 95 % intervals. vllm-schedule is given its best table in hindsight.</p>"
    )
    if any(_ours(s) for s in report.scenarios):
        yield "<h2>Bars</h2>"
        yield _table(
            ("demand", "wanted", "found", "", "where"),
            [
                (bar.name, f"{bar.wanted:g}", f"{bar.found:.4g}", _verdict(holds=bar.holds),
                 bar.where)
                for bar in bars(report)
            ],
        )  # fmt: skip
        yield "<h2>Overview</h2>"
        yield overview_plot(report)
        yield stationary_plot(report)
        yield _table(
            ("scenario", "of oracle", "of best static", "of off", "closest peer", "of it",
             "switches/1000", "recovery", "probing"),
            [_overview_row(s, ours) for s in report.scenarios if (ours := _ours(s))],
        )  # fmt: skip
    yield "<h2>Scenarios</h2>"
    for scenario in report.scenarios:
        yield _scenario(scenario)


def _ours(scenario: ScenarioReport) -> PolicyReport | None:
    return next((p for p in scenario.policies if p.name == OURS), None)


def _verdict(*, holds: bool) -> Cell:
    return Marked("good", "holds") if holds else Marked("bad", "missed")


def _overview_row(scenario: ScenarioReport, p: PolicyReport) -> tuple[str, ...]:
    peer = best_peer(scenario)
    return (
        scenario.name,
        ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
        ratio(p.ratio_to_best_static),
        ratio(p.ratio_to_off),
        peer or "-",
        ratio(p.ratio_to_peers[peer]) if peer else "-",
        f"{p.switches_per_1000_steps:.1f}",
        "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
        f"{p.probe_share:.2%}",
    )


def _scenario(scenario: ScenarioReport) -> str:
    head = (
        "policy", "origin", "tokens/s", "of oracle", "of best static", "of off", "switches/1000",
        "recovery", "probing", "TPOT ms", "decision us",
    )  # fmt: skip
    rows = [
        (
            p.name,
            p.origin.value,
            f"{p.tokens_per_second:.0f}",
            ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
            ratio(p.ratio_to_best_static, p.ratio_to_best_static_ci),
            ratio(p.ratio_to_off, p.ratio_to_off_ci),
            f"{p.switches_per_1000_steps:.1f}",
            "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
            f"{p.probe_share:.2%}" if p.name == OURS else "-",
            f"{p.tpot_ms:.2f}",
            f"{p.decision_microseconds:.1f}",
        )
        for p in scenario.policies
    ]
    plot = timeline_plot(scenario.timeline) if scenario.timeline is not None else ""
    return (
        f"<details><summary>{escape(scenario.name)}</summary>"
        f"<p class=small>{escape(scenario.description)}; {scenario.steps} steps, "
        f"{scenario.seeds} seeds, best static arm {escape(scenario.best_static)}</p>"
        f"{_table(head, rows)}{plot}</details>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    return table(head, rows, marked=[row[0] == OURS for row in rows])
