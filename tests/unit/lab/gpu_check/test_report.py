import copy
from typing import Any

import pytest

from lab.gpu_check import report

FOUND: dict[str, Any] = {
    "graphs_expected": True,
    "arms": [
        {"drafter": "eagle3", "gamma": 3, "steps": 40, "eager_steps": 0, "acceptance_length": 2.0},
        {"drafter": "dflash", "gamma": 15, "steps": 30, "eager_steps": 2, "acceptance_length": 3.5},
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


def test_a_check_of_some_parts_says_what_it_found():
    found = {
        "shape": "small",
        "acceptance": {"eagle3": 0.75},
        "machine": {"gpus": ["A Card, 10 MiB, 5.1"]},
        "versions": {"sglang": "1", "torch": "2"},
        "startup": {
            "seconds": {"steered": 4.0},
            "prepared": {"1": {"seconds": 2.0, "device_bytes": 2**21, "largest_batch": None}},
        },
    }
    text = report.markdown(found)
    assert "A Card" in text
    assert "| 1 | 2.0 | 2 | all |" in text
    assert "price" not in text
    assert report.problems(found) == []
    found["switch"] = {"batch_size": 4, "switches": 7, "microseconds": 30.0, "share": 0.01}
    assert "| changing the arm at B = 4, 7 times | 30 µs, 1.0 % of a step |" in report.markdown(
        found
    )


def test_a_table_is_markdown():
    assert report.table(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"
