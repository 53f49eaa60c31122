import copy
from typing import Any

import pytest

from lab.gpu_check import page

RESULTS: dict[str, Any] = {
    "shape": "small",
    "device": "GPU",
    "scale": "least",
    "acceptance": {"eagle3": 0.75},
    "seconds": 12.0,
    "machine": {"gpus": ["A Card"], "processor": "P"},
    "versions": {"sglang": "1", "torch": "2"},
    "startup": {"seconds": {"steered": 4.0}},
    "exact": {"tokens": 90, "arms": ["eagle3 3"], "wrong": 0, "rounding": 1, "differences": [
        {"verdict": "rounding", "sentence": "a tie"}
    ]},
    "learning": {
        "wrong": 0,
        "differences": [],
        "acceptance_lengths": [1.3, 1.8],
        "online": {"updates": 7, "refused": 0, "restored": 1, "state": "ready"},
        "syncs": {"steps": 30, "shim": {}, "others": {"b.py:1": 4}},
    },
    "rounding": {
        "plain-bfloat16": {"answers": 8, "differing": 0},
        "fixed-bfloat16": {"answers": 8, "differing": 2},
        "exact-bfloat16": {"answers": 16, "differing": 4},
    },
    "graphs": {
        "expected": True,
        "without_graphs": [],
        "prepared": {"1": {"seconds": 2.0, "device_bytes": 2**21, "predicted_bytes": 3 * 2**20,
                           "largest_batch": None}},
        "passes": {"verification": 2, "draft": 2, "draft_extend": 0},
        "arms": [{"drafter": "eagle3", "gamma": 3, "steps": 9, "eager_steps": 0, "beyond": 2}],
        "syncs": {"steps": 40, "shim": {"a.py:1": 3}, "others": {"x/site-packages/b.py:1": 5}},
    },
    "costs": {
        "short": {"context_tokens": 64, "profile": {
            "cells": [{"drafter": "eagle3", "gamma": 3, "batch_size": 4, "step_seconds": 0.0021}]
        }},
        "long": {"context_tokens": 512, "cells_so_far": [
            {"drafter": "eagle3", "gamma": 0, "batch_size": 1, "step_seconds": 0.001}
        ]},
    },
    "arms": {
        "arms": [{"drafter": "dflash", "gamma": 15, "tokens_per_second": 50.0, "steps": 30,
                  "eager_steps": 2, "acceptance_length": 3.5}],
        "steered": {"median": 60.0, "low": 59.0, "high": 61.0},
        "over": {"off": {"median": 1.2, "low": 1.1, "high": 1.3}},
        "phases": [{"phase": "1", "steered": {"median": 60.0}, "dflash 15": {"median": 50.0}}],
    },
    "switches": {
        "batch_size": 4,
        "change": {"switches": 7, "microseconds": 30.0, "share": 0.01},
        "wake": {"switches": 3, "microseconds": 90.0, "share": 0.03},
    },
    "asleep": {"8": {"median": 0.99, "low": 0.98, "high": 1.0}},
    "overhead": {"gamma": 3, "overlap": {"8": {
        "step_microseconds": {"median": 110.0, "low": 110.0, "high": 110.0},
        "step_microseconds_without": {"median": 100.0, "low": 100.0, "high": 100.0},
        "added_microseconds": {"median": 10.0, "low": 9.0, "high": 11.0},
        "speed": {"median": 0.91, "low": 0.9, "high": 0.92},
        "shim_microseconds": {"p50": 8.0, "p99": 21.0},
    }}},
    "outage": {"answers": 40, "lost": [], "wrong": 0, "differences": [], "reports_dropped": 5,
               "seconds_until_unsteered": 5.2, "seconds_until_steered": 1.1},
}  # fmt: skip


def changed(**parts: Any) -> dict[str, Any]:
    results = copy.deepcopy(RESULTS)
    for name, change in parts.items():
        results[name] |= change
    return results


def test_a_check_that_passed_is_verdicts_counts_and_figures():
    text = page.markdown(RESULTS)
    for line in (
        "# GPU check: A Card; SGLang 1, torch 2",
        "| exact | passed | 90 tokens, 1 arms, 0 wrong, 1 near-ties that rounding decided |",
        "| learning | passed | 0 wrong tokens; 7 updates landed, 0 refused, 1 taken back; ",
        "acceptance length by play: 1.30, 1.80; synchronisations in 30 steps: 0 shim, 4 SGLang",
        "steps with an eager pass: verification 2, draft 2, draft_extend 0; synchro",
        "0 of 9 steps eager (2 more beyond",
        "synchronisations in 40 steps: 3 shim, 5 SGLang",
        "| b.py:1 | others | 5 |",
        "| 1 | 2.0 | 2 | 3 | all |",
        "| eagle3 3 | 2.10 |",
        "contexts of 512 tokens (unfinished)",
        "| random arms, with the plugin | 16 | 4 | 0.250 |",
        "| off | 1.200 (1.100 to 1.300) |",
        "| 1 | 60.0 | 50.0 |",
        "30 µs, 1.0% of a step",
        "waking the drafter after 0.1 s of sleep at B = 4, 3 times",
        "| B = 8 | 0.990 (0.980 to 1.000) |",
        "| B = 8, overlap | 100 | 10 (9 to 11) | 0.910 (0.900 to 0.920) | 8 / 21 |",
        "| outage | passed | 40 answers, 0 lost, 0 wrong; unsteered 5.2 s after",
        "Seconds until an engine was ready: steered 4.0.",
    ):
        assert line in text
    assert "Problems" not in text
    assert page.problems(RESULTS) == []
    assert page.wrong_tokens(RESULTS) == 0


def test_a_check_of_one_part_has_a_page():
    results = {name: RESULTS[name] for name in ("shape", "device", "scale", "acceptance", "seconds",
                                            "machine", "versions", "exact")}  # fmt: skip
    text = page.markdown(results)
    assert "| exact | passed |" in text
    assert "graphs" not in text


def test_what_was_left_out_and_what_stopped_it_is_said():
    results = changed()
    results |= {"left_out": {"arms": "takes about 400 s, and 90 s are left"}, "stopped": "SIGTERM"}
    text = page.markdown(results)
    assert "- arms: takes about 400 s" in text
    assert "stopped (SIGTERM)" in text


def test_a_part_that_has_only_begun_has_a_page():
    results = changed()
    results["graphs"] = {
        key: RESULTS["graphs"][key] for key in ("expected", "without_graphs", "prepared")
    }
    results["arms"] = {"arms": [], "over": {}, "steered": RESULTS["arms"]["steered"]}
    text = page.markdown(results)
    assert "0 of 0 steps eager" in text
    assert "not compared yet" in text


def test_without_a_gpu_the_page_says_so():
    results = changed() | {"device": "emulated CUDA"}
    assert page.markdown(results).startswith("# GPU check: P (no GPU: emulated CUDA); SGLang 1")
    assert "durations and speeds on this page mean nothing" in page.markdown(results)
    assert "mean nothing" not in page.markdown(RESULTS)


def test_the_page_names_its_command_and_its_notation():
    command = ["python3", "-m", "lab.gpu_check", "--small-options", "--a b"]
    text = page.markdown(changed() | {"command": command})
    assert "- Command: `python3 -m lab.gpu_check --small-options '--a b'`" in text
    assert "An arm is a drafter and its draft length γ" in text


def test_wrong_tokens_and_eager_steps_are_problems():
    wrong = [{"verdict": "WRONG", "sentence": "prompt 4"}] * 9
    results = changed(exact={"wrong": 9, "differences": wrong})
    results["graphs"]["arms"][0]["eager_steps"] = 1
    text = page.markdown(results)
    assert "| exact | FAILED |" in text
    assert "| graphs | FAILED |" in text
    assert text.count("- prompt 4") == 8
    assert "and 2 more" in text
    assert "a tie" not in text
    assert page.problems(results)[-1] == "eagle3 gamma 3: 1 of 9 steps ran without a graph"
    assert page.wrong_tokens(results) == 9


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"differences": [{"verdict": "WRONG", "sentence": "prompt 4"}], "wrong": 1},
            "while learning, prompt 4",
        ),
        ({"online": {"updates": 0, "refused": 0, "restored": 0, "state": "starting"}},
         "no online update landed: starting"),
        ({"online": None}, "no online update landed: there was no trainer"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_learn_is_a_problem(change: dict[str, Any], problem: str):
    results = changed(learning=change)
    assert page.problems(results) == [problem]
    assert "| learning | FAILED |" in page.markdown(results)


def test_what_the_plugin_gave_up_is_a_problem():
    lost = {"exact": [{"capability": "CAPABILITY_DRAFTER", "reason": "BFloat16 != float"}]}
    results = changed() | {"lost": lost}
    assert page.problems(results) == [
        "engine exact: CAPABILITY_DRAFTER was lost: BFloat16 != float"
    ]


def test_a_request_that_is_lost_without_the_sidecar_is_a_problem():
    results = changed(outage={"lost": ["phase 'x' was played again"]})
    assert page.problems(results) == ["without its sidecar, phase 'x' was played again"]
    assert "| outage | FAILED |" in page.markdown(results)


def test_a_pass_without_any_graph_is_a_problem_where_graphs_are_expected():
    results = changed(graphs={"without_graphs": ["draft_extend"]})
    text = page.markdown(results)
    assert "| graphs | FAILED |" in text
    assert "no graphs at all for draft_extend; " in text
    (problem,) = page.problems(results)
    assert "draft_extend" in problem
    results["graphs"]["expected"] = False
    assert "| graphs | no graphs |" in page.markdown(results)
    assert page.problems(results) == []
