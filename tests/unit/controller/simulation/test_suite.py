"""The standard suite covers what is known to go wrong, and its small runs do what they promise."""

import dataclasses

import pytest

from controller.simulation.comparison.run import run_seed
from controller.simulation.comparison.summary import summarise
from controller.simulation.suite import measured_profile, standard
from controller.simulation.workload import ClosedLoop

SUITE = {scenario.name: scenario for scenario in standard()}


def test_every_known_trap_has_a_scenario():
    wanted = {
        "traffic/B=1", "load/h100", "load+traffic/h100", "bursts", "collapse/B=16", "drafters",
        "wrong-profile/plus30", "wrong-profile/minus30", "wrong-profile/none",
        "wrong-profile/context", "noise", "restless", "stale", "chat/B=1", "arrivals/rush",
        "mixed-classes",
    }  # fmt: skip
    assert wanted <= set(SUITE)
    costs = {name.split("/")[1] for name in SUITE if name.startswith("stationary/")}
    assert len(costs) == 6


def test_names_are_unique_and_workloads_are_repeatable():
    assert len(SUITE) == len(standard())
    first, again = SUITE["traffic/B=16"].workload(3), SUITE["traffic/B=16"].workload(3)
    assert isinstance(first, ClosedLoop)
    assert isinstance(again, ClosedLoop)
    assert (first.phases[0].pool.accepted["eagle"] == again.phases[0].pool.accepted["eagle"]).all()


def test_a_wrong_profile_is_as_wrong_as_it_says():
    surface = SUITE["noise"].surface
    right = {(c.gamma, c.batch_size): c.step_seconds for c in measured_profile(surface, 64).cells}
    wrong = SUITE["wrong-profile/plus30"].profile
    assert wrong is not None
    for cell in wrong.cells:
        factor = cell.step_seconds / right[cell.gamma, cell.batch_size]
        assert factor == pytest.approx(1.3 if cell.gamma else 1.0)


@pytest.mark.parametrize(
    ("name", "least"),
    [("load+traffic/scout", 0.97), ("wrong-profile/none", 0.95), ("drafters", 0.97)],
)
def test_the_controller_keeps_its_bars_on_one_seed(name, least):
    scenario = dataclasses.replace(SUITE[name], seeds=1)
    report = summarise(scenario, [run_seed(scenario, 0, ["controller", "tide", "hill-climber"])])
    ours = report.policy("controller")
    assert ours.ratio_to_oracle is not None
    assert ours.ratio_to_off is not None
    assert ours.ratio_to_oracle >= least
    assert ours.ratio_to_best_static > 1
    assert min(ours.ratio_to_peers.values()) > 1
    assert ours.ratio_to_off >= 0.99
