"""A report as tables for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.simulation.report.bars import OURS, bars, best_peer
from controller.simulation.results import PolicyReport, ScenarioReport, SimulationReport

# So many scenarios are shown policy by policy; more are shown in the overview alone.
_DETAILED = 6


def render_text(report: SimulationReport) -> Group:
    """Overview and bars; with a few scenarios also every policy of each."""
    return Group(*_parts(report))


def _parts(report: SimulationReport) -> Iterator[RenderableType]:
    if not report.scenarios:
        yield Text("no scenario was run")
        return
    if len(report.scenarios) <= _DETAILED:
        for scenario in report.scenarios:
            yield scenario_table(scenario)
    if any(p.name == OURS for s in report.scenarios for p in s.policies):
        yield overview_table(report)
        yield bars_table(report)
    yield Text(
        f"{len(report.scenarios)} scenarios in {report.wall_seconds:.0f} s, seed {report.seed}. "
        "Ratios are geometric means over paired seeds; vllm-schedule has its best table in "
        "hindsight."
    )


def ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """1.234 or 1.234 (1.200-1.270); - for nothing."""
    if value is None:
        return "-"
    if interval is None:
        return f"{value:.3f}"
    return f"{value:.3f} ({interval[0]:.3f}-{interval[1]:.3f})"


def scenario_table(scenario: ScenarioReport) -> Table:
    """One row a policy, the fastest first."""
    table = Table(title=f"{scenario.name}: {scenario.description}", title_justify="left")
    for column in ("policy", "origin"):
        table.add_column(column, no_wrap=True)
    for column in (
        "tokens/s", "of oracle", "of best static", "of off", "switches/1000", "recovery",
        "probing", "TPOT ms", "decision us",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for policy in scenario.policies:
        table.add_row(*_row(policy), style="bold" if policy.name == OURS else "")
    return table


def _row(p: PolicyReport) -> list[str]:
    return [
        p.name,
        p.origin.value,
        f"{p.tokens_per_second:.0f}",
        ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
        ratio(p.ratio_to_best_static),
        ratio(p.ratio_to_off),
        f"{p.switches_per_1000_steps:.1f}",
        "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
        f"{p.probe_share:.2%}" if p.name == OURS else "-",
        f"{p.tpot_ms:.2f}",
        f"{p.decision_microseconds:.1f}",
    ]


def overview_table(report: SimulationReport) -> Table:
    """One row a scenario: the controller against everything."""
    table = Table(title="controller", title_justify="left")
    table.add_column("scenario", overflow="fold")
    for column in ("of oracle", "of best static", "of off"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("closest peer")
    for column in ("of it", "switches/1000", "recovery", "probing", "us"):
        table.add_column(column, justify="right")
    for scenario in report.scenarios:
        for p in scenario.policies:
            if p.name == OURS:
                peer = best_peer(scenario)
                table.add_row(
                    scenario.name,
                    ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
                    ratio(p.ratio_to_best_static),
                    ratio(p.ratio_to_off),
                    peer or "-",
                    ratio(p.ratio_to_peers[peer]) if peer else "-",
                    f"{p.switches_per_1000_steps:.1f}",
                    "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
                    f"{p.probe_share:.2%}",
                    f"{p.decision_microseconds:.0f}",
                )
    return table


def bars_table(report: SimulationReport) -> Table:
    """The demands, and whether they hold."""
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
