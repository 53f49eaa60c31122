"""A report as tables and text."""

from collections.abc import Iterator, Mapping, Sequence

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
from controller.util.text import TextColumn, TextTable

# So many scenarios are shown policy by policy; more are shown in the overview alone.
_DETAILED = 6
# When a column is left out where there is no room; a column that is not named stays.
_SCENARIO = {
    "origin": 7, "tokens/s": 2, "of best static": 1, "of off": 1, "switches/1000": 4,
    "recovery": 5, "probing": 6, "probe steps": 8, "TPOT ms": 3, "decision us": 9,
}  # fmt: skip
_OVERVIEW = {
    "of best static": 1, "of off": 2, "closest peer": 3, "of it": 3, "switches/1000": 5,
    "recovery": 6, "probing": 4, "probe steps": 7, "us": 8,
}  # fmt: skip
_LATENCY = {"ms a token from arrival": 1, "TPOT ms": 2, "end to end s": 3}
_SUSTAINED = {"tokens/s sustained": 1}


def render_text(report: SimulationReport) -> Iterator[TextTable | str]:
    """Yields overview and bars; with a few scenarios also every policy of each."""
    if not report.scenarios:
        yield "no scenario was run"
        return
    if len(report.scenarios) <= _DETAILED:
        for scenario in report.scenarios:
            yield scenario_table(scenario)
            if rows := latency_rows(scenario):
                title = f"{scenario.name}: latency, mean / median / 99th percentile"
                yield TextTable(title, _columns(LATENCY_COLUMNS, _LATENCY), rows)
    for scenario in report.scenarios:
        if rows := sustained_rows(scenario.sustained):
            title = f"{scenario.name}: highest load within the latency bound"
            yield TextTable(title, _columns(SUSTAINED_COLUMNS, _SUSTAINED), rows)
    if any(map(ours, report.scenarios)):
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
        _columns(SCENARIO_COLUMNS, _SCENARIO),
        [scenario_row(policy, intervals=False) for policy in scenario.policies],
    )


def overview_table(report: SimulationReport) -> TextTable:
    """Makes one row for each scenario: the controller against everything."""
    return TextTable(
        "controller",
        _columns((*OVERVIEW_COLUMNS, "us"), _OVERVIEW),
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
            TextColumn("wanted", right=True, priority=1),
            TextColumn("found", right=True, priority=1),
            TextColumn("", styles={"holds": "green", "missed": "red"}),
            TextColumn("where", priority=2),
        ],
        [
            (
                bar.name, f"{bar.wanted:g}", f"{bar.found:.4g}",
                "holds" if bar.holds else "missed", bar.where,
            )
            for bar in bars(report)
        ],
    )  # fmt: skip


# Of words; all others are numbers.
_WORDS = {"policy", "origin", "scenario", "closest peer"}


def _columns(titles: Sequence[str], priorities: Mapping[str, int]) -> list[TextColumn]:
    return [
        TextColumn(title, title not in _WORDS, priorities.get(title, 0), {OURS: "bold"})
        for title in titles
    ]
