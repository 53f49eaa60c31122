"""Defines the bars that the controller has to reach, and checks them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.results import PolicyOrigin, PolicyReport, ScenarioReport, SimulationReport

OURS = "controller"
_PEERS = {PolicyOrigin.IMPORTED, PolicyOrigin.RESTATED}

ScenarioValue = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Bar:
    """States one demand.  value: the worst value, or the mean; worst_scenario: its scenario."""

    name: str
    required: float
    value: float
    holds: bool
    worst_scenario: str


def judge_bars(report: SimulationReport) -> tuple[Bar, ...]:
    """Checks every bar for which the report has results."""
    pairs = [
        (s, controller_report)
        for s in report.scenarios
        if (controller_report := find_controller_report(s))
    ]
    stationary_pairs = [(s, p) for s, p in pairs if not s.shifting]
    shifting_pairs = [(s, p) for s, p in pairs if s.shifting]
    wrong_profile_pairs = [(s, p) for s, p in pairs if s.group == "wrong-profile"]
    judged_bars = [
        _worst_value_bar(
            "stationary: worst cell against the oracle", 0.98, _oracle_ratios(stationary_pairs)
        ),
        _worst_value_bar("shifting: against the oracle", 0.97, _oracle_ratios(shifting_pairs)),
        _worst_value_bar(
            "wrong profile: against the oracle", 0.95, _oracle_ratios(wrong_profile_pairs)
        ),
        _worst_value_bar("shifting: against the best static arm", 1.0,
               [(p.ratio_to_best_static, s.name) for s, p in shifting_pairs], above=True),
        _worst_value_bar("shifting: against the best peer", 1.0,
               [(value, f"{s.name}: {peer}") for s, p in shifting_pairs
                if (peer := best_peer(s)) and (value := p.ratio_to_peers[peer])], above=True),
        _worst_value_bar("anywhere: against gamma = 0", 0.99,
               [(p.ratio_to_off, s.name) for s, p in pairs if p.ratio_to_off is not None]),
    ]  # fmt: skip
    recovery = [
        (p.recovery_steps, s.name) for s, p in shifting_pairs if p.recovery_steps is not None
    ]
    if recovery:
        steps, worst_scenario = max(recovery)
        judged_bars.append(
            Bar("shifting: median steps to recover", 100.0, steps, steps <= 100.0, worst_scenario)
        )
    if stationary_pairs:
        logs = [math.log(p.ratio_to_oracle) for _, p in stationary_pairs]
        mean = math.exp(sum(logs) / len(logs))
        judged_bars.insert(0, Bar("stationary: mean against the oracle", 0.99, mean, mean >= 0.99,
                            f"{len(stationary_pairs)} cells"))  # fmt: skip
    return tuple(bar for bar in judged_bars if bar is not None)


def best_peer(scenario: ScenarioReport) -> str | None:
    """Returns the name of the best peer relative to the controller."""
    controller_report = find_controller_report(scenario)
    if controller_report is None or not controller_report.ratio_to_peers:
        return None
    return min(controller_report.ratio_to_peers, key=controller_report.ratio_to_peers.__getitem__)


def is_peer(policy: PolicyReport) -> bool:
    """Whether a policy is from another project (not a static arm, not hindsight)."""
    return policy.origin in _PEERS


def find_controller_report(scenario: ScenarioReport) -> PolicyReport | None:
    """Returns the controller's own report; None when it did not run."""
    return next((p for p in scenario.policies if p.name == OURS), None)


def _oracle_ratios(pairs: Sequence[tuple[ScenarioReport, PolicyReport]]) -> list[ScenarioValue]:
    return [(policy.ratio_to_oracle, scenario.name) for scenario, policy in pairs]


def _worst_value_bar(
    name: str, required: float, values: Sequence[ScenarioValue], *, above: bool = False
) -> Bar | None:
    if not values:
        return None
    worst, worst_scenario = min(values)
    return Bar(
        name, required, worst, worst > required if above else worst >= required, worst_scenario
    )
