"""Engine steps a second of the simulator on one core: static, and steered by the production core.

    python -m tests.bench.simulation_bench

Both run the same scenario in turn, several times; the ratio is of one run.
"""

import statistics
import time

from controller.simulation.engine import simulate
from controller.simulation.ours import ControllerPolicy
from controller.simulation.peers.static import Static
from controller.simulation.scenario import Scenario
from controller.simulation.suite import standard

REPEATS = 5
SCENARIOS = ("load+traffic/h100", "traffic/B=16", "load/scout")


def steps_per_second(scenario: Scenario, *, steered: bool) -> float:
    """Of one run, set-up of the workload left out."""
    workload, surface = scenario.workload(0), scenario.surface
    policy = (
        ControllerPolicy(surface, scenario.profile, scenario.max_batch_size)
        if steered
        else Static(surface.arms, len(surface.arms) // 2)
    )
    began = time.perf_counter()
    result = simulate(workload, surface, policy, scenario.options, 0)
    return result.steps / (time.perf_counter() - began)


def main() -> None:
    """Prints medians and ranges."""
    scenarios = {scenario.name: scenario for scenario in standard()}
    for name in SCENARIOS:
        runs = [
            (
                steps_per_second(scenarios[name], steered=False),
                steps_per_second(scenarios[name], steered=True),
            )
            for _ in range(REPEATS)
        ]
        plain, steered = zip(*runs, strict=True)
        fast, slow = statistics.median(plain), statistics.median(steered)
        print(
            f"{name}: steered {slow:,.0f} steps/s ({min(steered):,.0f}-{max(steered):,.0f}), "
            f"static {fast:,.0f}; the core takes {1e6 / slow - 1e6 / fast:.0f} us a step"
        )


if __name__ == "__main__":
    main()
