"""Engine steps a second of the simulator on one core: static, and steered by the production core.

    python -m tools.bench.simulation_bench

Both run the same scenario in turn, several times; the ratio is of one run.
"""

import argparse
import time
from collections.abc import Iterable

from simulator.controller_policy import ControllerPolicy
from simulator.engine import simulate
from simulator.peers.static import StaticPolicy
from simulator.scenarios.scenario_file import Scenario, standard_scenarios
from tools.bench.measurement import Measurement, command_line, run

_SCENARIOS = ("load+traffic/h100", "traffic/B=16", "load/scout")


def _step_seconds(scenario: Scenario, *, steered: bool) -> float:
    """Returns the seconds of a step in one run, without the set-up of the workload."""
    workload, surface = scenario.workload(0), scenario.surface
    policy = (
        ControllerPolicy(surface, scenario.profile, scenario.max_batch_size)
        if steered
        else StaticPolicy(surface.arms, len(surface.arms) // 2)
    )
    start = time.perf_counter()
    result = simulate(workload, surface, policy, scenario.options, 0)
    return (time.perf_counter() - start) / result.steps


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Steps a second, and what the core takes of a step."""
    scenarios = {scenario.name: scenario for scenario in standard_scenarios()}
    for name in _SCENARIOS:
        plain, steered = [], []
        for _ in range(options.repeats):
            plain.append(_step_seconds(scenarios[name], steered=False))
            steered.append(_step_seconds(scenarios[name], steered=True))
        core_times = [1e6 * (b - a) for a, b in zip(plain, steered, strict=True)]
        yield Measurement(f"simulator, {name}, steered", "steps/s", [1 / s for s in steered])
        yield Measurement(f"simulator, {name}, static", "steps/s", [1 / s for s in plain])
        yield Measurement(f"simulator, {name}, the core's part of a step", "us", core_times)


PARSER = command_line(__doc__, repeats=5)

if __name__ == "__main__":
    run(PARSER, measure)
