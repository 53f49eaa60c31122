import copy
from typing import Any

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
