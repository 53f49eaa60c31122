import copy
from typing import Any

import pytest

from engine_shim.gpu_check import report

FOUND: dict[str, Any] = {
    "graphs_expected": True,
    "arms": [
        {"drafter": "eagle3", "gamma": 3, "steps": 40, "eager_steps": 0},
        {"drafter": "dflash", "gamma": 15, "steps": 30, "eager_steps": 2},
    ],
}


def test_an_arm_that_ran_without_its_graph_is_a_problem():
    assert report.problems(FOUND) == [
        "dflash gamma 15: 2 of 30 steps ran without a graph",
    ]


@pytest.mark.parametrize("change", ["no graphs", "no eager step"])
def test_otherwise_there_is_none(change: str):
    found = copy.deepcopy(FOUND)
    if change == "no graphs":
        found["graphs_expected"] = False
    else:
        found["arms"][1]["eager_steps"] = 0
    assert report.problems(found) == []


def test_a_table_is_markdown():
    assert report.table(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"
