"""A report as tables and text; the rows of its tables serve the page, too."""

from collections.abc import Iterator, Mapping

from controller.util.text import TextColumn, TextTable
from simulator.report.bars import OURS, best_peer, find_controller_report, judge_bars
from simulator.results import PolicyReport, ScenarioReport, SimulationReport, Spread, SustainedLoad

# Title -> order in which columns are omitted in a narrow terminal, the highest first; 0: never.
SCENARIO_COLUMNS = {
    "policy": 0, "origin": 7, "tokens/s": 2, "of oracle": 0, "of best static": 1, "of off": 1,
    "switches/1000": 4, "recovery": 5, "probing": 6, "probe steps": 8, "TPOT ms": 3,
    "decision us": 9,
}  # fmt: skip
OVERVIEW_COLUMNS = {
    "scenario": 0, "of oracle": 0, "of best static": 1, "of off": 2, "closest peer": 3, "of it": 3,
    "switches/1000": 5, "recovery": 6, "probing": 4, "probe steps": 7,
}  # fmt: skip
# Mean, median and 99th percentile each.
LATENCY_COLUMNS = {"policy": 0, "ms a token from arrival": 1, "TPOT ms": 2, "end to end s": 3}
SUSTAINED_COLUMNS = {"policy": 0, "requests/s sustained": 0, "tokens/s sustained": 1}

# Up to this many scenarios are shown policy by policy; more are shown only in the overview.
_MAX_DETAILED_SCENARIOS = 6


def render_text(report: SimulationReport) -> Iterator[TextTable | str]:
    """Yields overview and bars; with a few scenarios also every policy of each."""
    if not report.scenarios:
        yield "no scenario was run"
        return
    if len(report.scenarios) <= _MAX_DETAILED_SCENARIOS:
        for scenario in report.scenarios:
            yield scenario_table(scenario)
            if rows := latency_rows(scenario):
                title = f"{scenario.name}: latency, mean / median / 99th percentile"
                yield TextTable(title, _columns(LATENCY_COLUMNS), rows)
    for scenario in report.scenarios:
        if rows := sustained_rows(scenario.sustained):
            title = f"{scenario.name}: highest load within the latency bound"
            yield TextTable(title, _columns(SUSTAINED_COLUMNS), rows)
    if any(map(find_controller_report, report.scenarios)):
        yield overview_table(report)
        yield bars_table(report)
    yield (
        f"{len(report.scenarios)} scenarios in {report.wall_seconds:.0f} s, seed {report.seed}. "
        "Ratios are geometric means over paired seeds, of tokens per second or, where requests "
        "arrive by themselves, of the inverse of the mean latency per token; vllm-schedule has its "
        "best table in hindsight."
    )


def scenario_table(scenario: ScenarioReport) -> TextTable:
    """Makes one row for each policy, the best first."""
    return TextTable(
        f"{scenario.name}: {scenario.description}",
        _columns(SCENARIO_COLUMNS),
        [scenario_row(policy, intervals=False) for policy in scenario.policies],
    )


def overview_table(report: SimulationReport) -> TextTable:
    """Makes one row for each scenario: the controller against everything."""
    return TextTable(
        "controller",
        _columns({**OVERVIEW_COLUMNS, "us": 8}),
        [
            (*row, f"{policy.decision_microseconds:.0f}")
            for policy, row in overview_rows(report.scenarios)
        ],
    )


def bars_table(report: SimulationReport) -> TextTable:
    """Shows the demands, and whether they hold."""
    return TextTable(
        "bars",
        [
            TextColumn("demand"),
            TextColumn("wanted", is_right_aligned=True, priority=1),
            TextColumn("found", is_right_aligned=True, priority=1),
            TextColumn("", styles={"holds": "green", "missed": "red"}),
            TextColumn("where", priority=2),
        ],
        [
            (
                bar.name, f"{bar.required:g}", f"{bar.value:.4g}",
                "holds" if bar.holds else "missed", bar.worst_scenario,
            )
            for bar in judge_bars(report)
        ],
    )  # fmt: skip


# Columns with text; all others have numbers.
_TEXT_COLUMNS = {"policy", "origin", "scenario", "closest peer"}


def _columns(priorities: Mapping[str, int]) -> list[TextColumn]:
    return [
        TextColumn(title, title not in _TEXT_COLUMNS, priority, {OURS: "bold"})
        for title, priority in priorities.items()
    ]


def format_ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """Formats 1.234 or 1.234 (1.200-1.270), and a missing value as "-"."""
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" ({interval[0]:.3f}-{interval[1]:.3f})" if interval else "")


def scenario_row(p: PolicyReport, *, intervals: bool) -> tuple[str, ...]:
    """Makes a policy's row of SCENARIO_COLUMNS; intervals: with those of every ratio."""
    return (
        p.name,
        p.origin.value,
        f"{p.tokens_per_second:.0f}",
        format_ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
        format_ratio(p.ratio_to_best_static, p.ratio_to_best_static_ci if intervals else None),
        format_ratio(p.ratio_to_off, p.ratio_to_off_ci if intervals else None),
        *_behaviour_cells(p)[:2],
        *(_behaviour_cells(p)[2:] if p.name == OURS else ("-", "-")),
        f"{p.tpot_ms:.2f}",
        f"{p.decision_microseconds:.1f}",
    )


def latency_rows(scenario: ScenarioReport) -> list[tuple[str, ...]]:
    """Makes a row of LATENCY_COLUMNS for every policy of an open loop; [] for a closed one."""
    return [
        (
            p.name,
            _format_spread(p.latency.per_token, 1e3),
            _format_spread(p.latency.tpot, 1e3),
            _format_spread(p.latency.end_to_end, 1.0),
        )
        for p in scenario.policies
        if p.latency is not None
    ]


def _format_spread(latency: Spread, scale: float) -> str:
    return " / ".join(f"{scale * value:.2f}" for value in (latency.mean, latency.p50, latency.p99))


def sustained_rows(loads: tuple[SustainedLoad, ...]) -> list[tuple[str, ...]]:
    """Makes a row of SUSTAINED_COLUMNS for every policy, the highest load first."""
    ranked = sorted(loads, key=lambda load: -load.requests_per_second)
    return [
        (load.name, f"{load.requests_per_second:.2f}", f"{load.tokens_per_second:.0f}")
        for load in ranked
    ]


def overview_rows(
    scenarios: tuple[ScenarioReport, ...],
) -> list[tuple[PolicyReport, tuple[str, ...]]]:
    """Makes a row of OVERVIEW_COLUMNS for every scenario that the controller ran in."""
    rows: list[tuple[PolicyReport, tuple[str, ...]]] = []
    for scenario in scenarios:
        if p := find_controller_report(scenario):
            peer = best_peer(scenario)
            row = (
                scenario.name,
                format_ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
                format_ratio(p.ratio_to_best_static),
                format_ratio(p.ratio_to_off),
                peer or "-",
                format_ratio(p.ratio_to_peers[peer]) if peer else "-",
                *_behaviour_cells(p),
            )
            rows.append((p, row))
    return rows


def _behaviour_cells(p: PolicyReport) -> tuple[str, ...]:
    return (
        f"{p.switches_per_1000_steps:.1f}",
        "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
        f"{p.probe_share:.2%}",
        f"{p.probe_step_share:.2%}",
    )
