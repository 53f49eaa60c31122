"""Names and makes the policies that can run in a scenario."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from controller.core.plan import MixtureRule
from controller.core.settings import PlannerSettings
from simulator.controller_policy import ControllerPolicy
from simulator.engine import RunResult
from simulator.peers import standard_peers
from simulator.peers.static import StaticPolicy
from simulator.peers.vllm import best_table
from simulator.policy import Policy
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import CostSurface

OURS = "controller"
ORACLE = "oracle"
BY_REQUEST = "oracle-by-request"
OFF = "off"

Factory = Callable[[], Policy]


def static_names(surface: CostSurface) -> dict[str, int]:
    """Returns name -> arm index of every static arm; plain decoding is listed once."""
    has_several_drafters = len(surface.drafters) > 1
    names: dict[str, int] = {}
    for i, arm in enumerate(surface.arms):
        if arm.gamma == 0:
            names.setdefault(OFF, i)
        else:
            names[
                f"static-{arm.drafter}-{arm.gamma}"
                if has_several_drafters
                else f"static-{arm.gamma}"
            ] = i
    return names


def policy_names(scenario: Scenario) -> list[str]:
    """Returns the names of all policies that can be selected for the scenario."""
    peers = standard_peers(scenario.surface.without_mixtures.arms, scenario.profile, ((1, 1, 0),))
    return [OURS, ORACLE, BY_REQUEST, *static_names(scenario.surface), *peers]


def static_factories(surface: CostSurface, rules: Sequence[MixtureRule] = ()) -> dict[str, Factory]:
    """Makes one policy for every static arm.  rules: of mixtures, see `Truth`."""
    return {
        name: partial(StaticPolicy, surface.arms, arm, rules)
        for name, arm in static_names(surface).items()
    }


def peer_factories(scenario: Scenario, static_runs: Mapping[str, RunResult]) -> dict[str, Factory]:
    """Makes every peer; peers do not support mixtures, so they do not get the arms of mixtures.

    static_runs: of every static arm, in the order of `static_names`; the table is made from them.
    """
    surface = scenario.surface.without_mixtures
    # Every arm at gamma = 0 is the one static arm OFF.
    name_by_arm = {arm: name for name, arm in static_names(scenario.surface).items()}
    by_arm = [static_runs[name_by_arm.get(i, OFF)] for i in range(len(surface.arms))]
    table = best_table([result.octaves for result in by_arm])
    return dict(standard_peers(surface.arms, scenario.profile, table))


def make_controller(
    scenario: Scenario, settings: PlannerSettings | None = None
) -> ControllerPolicy:
    """Makes the production core with the scenario's surface and profile."""
    return ControllerPolicy(scenario.surface, scenario.profile, scenario.max_batch_size, settings)
