"""Formats what the tables for a terminal and for the page have in common."""

from simulator.latency import Spread
from simulator.report.bars import OURS, best_peer, ours
from simulator.results import PolicyReport, ScenarioReport, SustainedLoad

SCENARIO_COLUMNS = (
    "policy", "origin", "tokens/s", "of oracle", "of best static", "of off", "switches/1000",
    "recovery", "probing", "probe steps", "TPOT ms", "decision us",
)  # fmt: skip
OVERVIEW_COLUMNS = (
    "scenario", "of oracle", "of best static", "of off", "closest peer", "of it", "switches/1000",
    "recovery", "probing", "probe steps",
)  # fmt: skip
# Mean, median and 99th percentile each.
LATENCY_COLUMNS = ("policy", "ms a token from arrival", "TPOT ms", "end to end s")
SUSTAINED_COLUMNS = ("policy", "requests/s sustained", "tokens/s sustained")


def ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
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
        ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
        ratio(p.ratio_to_best_static, p.ratio_to_best_static_ci if intervals else None),
        ratio(p.ratio_to_off, p.ratio_to_off_ci if intervals else None),
        *_behaviour(p)[:2],
        *(_behaviour(p)[2:] if p.name == OURS else ("-", "-")),
        f"{p.tpot_ms:.2f}",
        f"{p.decision_microseconds:.1f}",
    )


def latency_rows(scenario: ScenarioReport) -> list[tuple[str, ...]]:
    """Makes a row of LATENCY_COLUMNS for every policy of an open loop; [] for a closed one."""
    return [
        (
            p.name,
            _spread(p.latency.per_token, 1e3),
            _spread(p.latency.tpot, 1e3),
            _spread(p.latency.end_to_end, 1.0),
        )
        for p in scenario.policies
        if p.latency is not None
    ]


def _spread(latency: Spread, scale: float) -> str:
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
        if p := ours(scenario):
            peer = best_peer(scenario)
            row = (
                scenario.name,
                ratio(p.ratio_to_oracle, p.ratio_to_oracle_ci),
                ratio(p.ratio_to_best_static),
                ratio(p.ratio_to_off),
                peer or "-",
                ratio(p.ratio_to_peers[peer]) if peer else "-",
                *_behaviour(p),
            )
            rows.append((p, row))
    return rows


def _behaviour(p: PolicyReport) -> tuple[str, ...]:
    return (
        f"{p.switches_per_1000_steps:.1f}",
        "-" if p.recovery_steps is None else f"{p.recovery_steps:.0f}",
        f"{p.probe_share:.2%}",
        f"{p.probe_step_share:.2%}",
    )
