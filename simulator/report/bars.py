"""Defines the bars that the controller has to reach, and checks them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.results import PolicyOrigin, PolicyReport, ScenarioReport, SimulationReport

OURS = "controller"
_PEERS = {PolicyOrigin.IMPORTED, PolicyOrigin.RESTATED}

Found = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Bar:
    """States one demand.  found: the worst value, or the mean; where: the scenario of the worst."""

    name: str
    wanted: float
    found: float
    holds: bool
    where: str


def bars(report: SimulationReport) -> tuple[Bar, ...]:
    """Checks every bar for which the report has results."""
    pairs = [(s, mine) for s in report.scenarios if (mine := ours(s))]
    still = [(s, p) for s, p in pairs if not s.shifting]
    moving = [(s, p) for s, p in pairs if s.shifting]
    wrong = [(s, p) for s, p in pairs if s.group == "wrong-profile"]
    found = [
        _least("stationary: worst cell against the oracle", 0.98, _values(still)),
        _least("shifting: against the oracle", 0.97, _values(moving)),
        _least("wrong profile: against the oracle", 0.95, _values(wrong)),
        _least("shifting: against the best static arm", 1.0,
               [(p.ratio_to_best_static, s.name) for s, p in moving], above=True),
        _least("shifting: against the best peer", 1.0,
               [(value, f"{s.name}: {peer}") for s, p in moving
                if (peer := best_peer(s)) and (value := p.ratio_to_peers[peer])], above=True),
        _least("anywhere: against gamma = 0", 0.99,
               [(p.ratio_to_off, s.name) for s, p in pairs if p.ratio_to_off is not None]),
    ]  # fmt: skip
    recovery = [(p.recovery_steps, s.name) for s, p in moving if p.recovery_steps is not None]
    if recovery:
        steps, where = max(recovery)
        found.append(Bar("shifting: median steps to recover", 100.0, steps, steps <= 100.0, where))
    if still:
        logs = [math.log(p.ratio_to_oracle) for _, p in still]
        mean = math.exp(sum(logs) / len(logs))
        found.insert(0, Bar("stationary: mean against the oracle", 0.99, mean, mean >= 0.99,
                            f"{len(still)} cells"))  # fmt: skip
    return tuple(bar for bar in found if bar is not None)


def best_peer(scenario: ScenarioReport) -> str | None:
    """Returns the name of the best peer relative to the controller."""
    mine = ours(scenario)
    if mine is None or not mine.ratio_to_peers:
        return None
    return min(mine.ratio_to_peers, key=mine.ratio_to_peers.__getitem__)


def is_peer(policy: PolicyReport) -> bool:
    """Whether a policy is from another project (not a static arm, not hindsight)."""
    return policy.origin in _PEERS


def ours(scenario: ScenarioReport) -> PolicyReport | None:
    """Returns the controller's own report; None when it did not run."""
    return next((p for p in scenario.policies if p.name == OURS), None)


def _values(pairs: Sequence[tuple[ScenarioReport, PolicyReport]]) -> list[Found]:
    return [(policy.ratio_to_oracle, scenario.name) for scenario, policy in pairs]


def _least(name: str, wanted: float, values: Sequence[Found], *, above: bool = False) -> Bar | None:
    if not values:
        return None
    found, where = min(values)
    return Bar(name, wanted, found, found > wanted if above else found >= wanted, where)
