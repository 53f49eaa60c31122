"""The standard suite covers what is known to go wrong, and its small runs do what they promise."""

import dataclasses
import re
from pathlib import Path

import pytest

from simulator.comparison.run import run_seed
from simulator.comparison.summary import summarise
from simulator.engine import simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from simulator.scenarios import scenario_file
from simulator.scenarios.scenario_file import load_scenario, scenario_text, standard_scenarios
from simulator.workload import ClosedLoop
from tests.support.golden import golden, is_close

SUITE = {scenario.name: scenario for scenario in standard_scenarios()}


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


@pytest.mark.parametrize(
    "pattern",
    [
        r"wrong-profile/fast-x2", r"wrong-profile/fast-x5", r"context-by-batch/20",
        r"acceptance-by-batch/100", r"recurring/traffic/(20|50|100|200|400)", r"recurring/drafters",
        r"memory/editing/B=(1|16)", r"switch-price", r"wrong-profile/drafting-x3",
        r"wrong-profile/every-second", r"fast-engine", r"hours", r"rows/(editing|chat)",
    ],
)  # fmt: skip
def test_every_blind_spot_has_a_scenario(pattern: str):
    assert any(re.match(pattern, name) for name in SUITE)


def test_names_are_unique_and_workloads_are_repeatable():
    files = list(scenario_file.SUITE_FOLDER.rglob("*.yaml"))
    assert len(SUITE) == len(files)
    first, again = SUITE["traffic/B=16"].workload(3), SUITE["traffic/B=16"].workload(3)
    assert isinstance(first, ClosedLoop)
    assert isinstance(again, ClosedLoop)
    assert (first.phases[0].pool.accepted["eagle"] == again.phases[0].pool.accepted["eagle"]).all()


def test_the_text_of_a_scenario_makes_the_same_scenario_elsewhere(tmp_path: Path):
    for name in ("bursts", "drafters", "arrivals/rush", "memory/editing/B=16"):
        copied = tmp_path / "copy.yaml"
        copied.write_text(scenario_text(name))
        copy, original = load_scenario(copied), SUITE[name]
        assert copy.name == name
        assert copy.profile == original.profile
        assert (copy.surface.seconds == original.surface.seconds).all()
        assert copy.options == original.options


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(InvalidInputError, match=r"'burst' is not in the suite.*load/h100, "):
        scenario_text("burst")


# One for each way in which a workload is made; (arm, seeds) that the golden file has numbers of.
@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("stationary/tide-qwen3-235b/alpha=0.7/B=16", "static-3"),
        ("stationary/h100-llama3.1-8b/json/B=16", "static-5"),
        ("stationary/b200-qwen3.6-35b-a3b/survival/B=16", "static-2"),
        ("load+traffic/scout", "static-2"),
        ("stale", "static-3"),
        ("noise", "off"),
        ("drafters", "static-dflash-3"),
        ("mixed-classes", "static-4"),
        ("arrivals/rush", "static-2"),
    ],
)
def test_scenarios_that_were_there_before_files_give_the_same_numbers(name: str, arm: str):
    scenario, numbers = SUITE[name], golden()[name]
    drafter, gamma = arm.split("-")[-2:] if arm.count("-") == 2 else ("", arm.rpartition("-")[2])
    index = next(
        i
        for i, a in enumerate(scenario.surface.arms)
        if a.gamma == (0 if arm == "off" else int(gamma)) and drafter in {"", a.drafter}
    )
    runs = [
        simulate(
            scenario.workload(seed),
            scenario.surface,
            StaticPolicy(scenario.surface.arms, index),
            scenario.options,
            seed,
        )
        for seed in range(scenario.seeds)
    ]
    rate = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
    assert is_close(rate, numbers["tokens_per_second"][arm])


def test_a_wrong_profile_is_as_wrong_as_it_says():
    exact, plus = SUITE["noise"].profile, SUITE["wrong-profile/plus30"].profile
    assert exact is not None
    assert plus is not None
    right = {(c.gamma, c.batch_size): c.step_seconds for c in exact.cells}
    for cell in plus.cells:
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
