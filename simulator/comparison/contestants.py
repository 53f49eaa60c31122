"""Names everything that may run in a scenario, and makes it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from controller.core.plan import MixtureRule
from controller.core.settings import PlannerSettings
from simulator.comparison.hindsight import (
    SegmentSchedule,
    best_by_segment,
    clairvoyants,
    segment_classes,
)
from simulator.comparison.truth import Truth
from simulator.controller_policy import ControllerPolicy
from simulator.engine import RunResult
from simulator.peers import standard_peers
from simulator.peers.static import Static
from simulator.peers.vllm_schedule import best_table
from simulator.policy import Policy
from simulator.scenario import Scenario
from simulator.surface import CostSurface
from simulator.workload import Workload

OURS = "controller"
ORACLE = "oracle"
BY_REQUEST = "oracle-by-request"
OFF = "off"

Factory = Callable[[], Policy]


def static_names(surface: CostSurface) -> dict[str, int]:
    """Name -> arm index of every static arm; plain decoding once, whoever would not draft."""
    several = len(surface.drafters) > 1
    names: dict[str, int] = {}
    for i, arm in enumerate(surface.arms):
        if arm.gamma == 0:
            names.setdefault(OFF, i)
        else:
            names[f"static-{arm.drafter}-{arm.gamma}" if several else f"static-{arm.gamma}"] = i
    return names


def policy_names(scenario: Scenario) -> list[str]:
    """Lists everything that `wanted` may name."""
    peers = standard_peers(scenario.surface.plain.arms, scenario.profile, ((1, 1, 0),))
    return [OURS, ORACLE, BY_REQUEST, *static_names(scenario.surface), *peers]


def statics(surface: CostSurface, rules: Sequence[MixtureRule] = ()) -> dict[str, Factory]:
    """Makes one policy for every static arm.  rules: of mixtures, see `Truth`."""
    return {
        name: partial(Static, surface.arms, arm, rules)
        for name, arm in static_names(surface).items()
    }


def oracle_candidates(
    scenario: Scenario, workload: Workload, truth: Truth, static_runs: Mapping[str, RunResult]
) -> dict[str, Factory]:
    """Makes what competes with the static arms for being the oracle.

    static_runs: of every static arm, in the order of `static_names`.
    """
    found = clairvoyants(scenario.surface, scenario.options, truth.expected_by_pool(), truth.rules)
    index = list(static_names(scenario.surface).values())
    best = best_by_segment(list(static_runs.values()), segment_classes(workload))
    schedule = [index[i] for i in best]
    if len(set(schedule)) > 1:
        found["schedule"] = partial(SegmentSchedule, schedule, truth.rules)
    return found


def by_request_candidates(scenario: Scenario, truth: Truth) -> dict[str, Factory]:
    """Makes what knows of every running request which kind it is; {} where all are alike."""
    if not truth.mixed:
        return {}
    return clairvoyants(scenario.surface, scenario.options, truth.expected_by_kind(), truth.rules)


def peers(scenario: Scenario, static_runs: Mapping[str, RunResult]) -> dict[str, Factory]:
    """Makes every peer; none of them knows what a mixture is, so they do not see its arms.

    static_runs: see `oracle_candidates`; they give the table in hindsight.
    """
    surface = scenario.surface.plain
    # Every arm at gamma = 0 is the one static arm OFF.
    name_of = {arm: name for name, arm in static_names(scenario.surface).items()}
    by_arm = [static_runs[name_of.get(i, OFF)] for i in range(len(surface.arms))]
    table = best_table([result.octaves for result in by_arm])
    return dict(standard_peers(surface.arms, scenario.profile, table))


def controller(scenario: Scenario, settings: PlannerSettings | None = None) -> ControllerPolicy:
    """Makes the production core with what the scenario gives it."""
    return ControllerPolicy(scenario.surface, scenario.profile, scenario.max_batch_size, settings)
