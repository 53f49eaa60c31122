import copy
from typing import Any

import pytest

from lab.gpu_check import page, report

FOUND: dict[str, Any] = {
    "shape": "small",
    "seconds": 12.0,
    "machine": {"gpus": ["A Card"]},
    "versions": {"sglang": "1", "torch": "2"},
    "graphs_expected": True,
    "exact": {"tokens": 90, "arms": ["eagle3 3"], "wrong": 0, "rounding": 1, "differences": [
        {"verdict": "rounding", "sentence": "a tie"}
    ]},
    "learning": {
        "wrong": 0,
        "differences": [],
        "acceptance_lengths": [1.3, 1.8],
        "online": {"updates": 7, "refused": 0, "restored": 1, "state": "ready"},
        "lost": [],
        "syncs": {"steps": 30, "shim": {}, "others": {"b.py:1": 4}},
    },
    "startup": {"without_graphs": []},
    "graphs": {
        "passes": {"verification": 2, "draft": 2, "draft_extend": 0},
        "arms": [{"drafter": "eagle3", "gamma": 3, "steps": 9, "eager_steps": 0, "beyond": 2}],
        "syncs": {"steps": 40, "shim": {"a.py:1": 3}, "others": {"b.py:1": 5}},
    },
    "profile": {
        "cells": [{"drafter": "eagle3", "gamma": 3, "batch_size": 4, "step_seconds": 0.0021}]
    },
}  # fmt: skip


def test_a_check_that_passed_is_verdicts_counts_and_costs():
    text = page.markdown(FOUND)
    for line in (
        "A Card; SGLang 1, torch 2",
        "| exact | passed | 90 tokens, 1 arms, 0 wrong, 1 near-ties that rounding decided |",
        "| learning | passed | 0 wrong tokens; 7 updates landed, 0 refused, 1 taken back; ",
        "acceptance length by play: 1.30, 1.80; synchronisations in 30 steps: 0 shim, 4 SGLang",
        "steps with an eager pass: verification 2, draft 2, draft_extend 0; synchro",
        "0 of 9 steps eager (2 more beyond",
        "synchronisations in 40 steps: 3 shim, 5 SGLang",
        "| eagle3 3 | 2.10 |",
    ):
        assert line in text
    assert "Problems" not in text
    assert report.problems(FOUND) == []


def test_wrong_tokens_and_eager_steps_are_problems():
    found = copy.deepcopy(FOUND)
    found["exact"] |= {"wrong": 8}
    found["exact"]["differences"] += [{"verdict": "WRONG", "sentence": "prompt 4"}] * 8
    found["graphs"]["arms"][0]["eager_steps"] = 1
    text = page.markdown(found)
    assert "| exact | FAILED |" in text
    assert "| graphs | FAILED |" in text
    assert text.count("- prompt 4") == 5
    assert "and 4 more" in text
    assert "a tie" not in text
    assert report.problems(found)[-1] == "eagle3 gamma 3: 1 of 9 steps ran without a graph"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"differences": [{"verdict": "WRONG", "sentence": "prompt 4"}], "wrong": 1},
            "while learning, prompt 4",
        ),
        ({"online": {"updates": 0, "refused": 0, "restored": 0, "state": "starting"}},
         "no online update landed: starting"),
        ({"online": None}, "no online update landed: there was no trainer"),
        ({"lost": [{"capability": "CAPABILITY_UPDATE_ONLINE", "reason": "out of memory"}]},
         "CAPABILITY_UPDATE_ONLINE was lost: out of memory"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_learn_is_a_problem(changed: dict[str, Any], problem: str):
    found = copy.deepcopy(FOUND)
    found["learning"] |= changed
    assert report.problems(found) == [problem]
    assert "| learning | FAILED |" in page.markdown(found)


def test_a_pass_without_any_graph_is_a_problem_where_graphs_are_expected():
    found = copy.deepcopy(FOUND)
    found["startup"]["without_graphs"] = ["draft_extend"]
    text = page.markdown(found)
    assert "| graphs | FAILED |" in text
    assert "no graphs at all for draft_extend; " in text
    (problem,) = report.problems(found)
    assert "draft_extend" in problem
    found["graphs_expected"] = False
    assert "| graphs | no graphs |" in page.markdown(found)
    assert report.problems(found) == []
