import json
import struct
from dataclasses import replace

import pytest

from lab.demo import picture, report, result
from lab.harness.terminal import Terminal
from tests.unit.lab.demo.outcomes import outcome


def test_every_policy_is_one_run_with_its_median_and_its_repeats():
    runs = json.loads(json.dumps(result.as_json(outcome())))["runs"]
    assert [run["policy"] for run in runs] == ["off", "static-3", "sglang-adaptive", "steered"]
    assert [run["exact"] for run in runs] == [True, False, True, True]
    steered = runs[-1]
    assert [repeat["tokens_per_second"] for repeat in steered["repeats"]] == [10.0, 16.0]
    assert steered["tokens_per_second"] == 13.0
    assert steered["acceptance_length"] == 3.0
    assert [phase["median"] for phase in steered["phases"]] == [13.0, 13.0]
    (wrong,) = runs[1]["repeats"][1]["mismatches"]
    assert wrong == {"request": 2, "position": 2, "expected": 7, "found": 9}


def test_ratios_are_named_and_carry_their_spread():
    ratios = result.as_json(outcome())["ratios"]
    assert set(ratios) == {"steered/off", "steered/static-3", "steered/sglang-adaptive"}
    assert ratios["steered/sglang-adaptive"]["repeats"] == pytest.approx([2.5, 2.0])
    assert len(ratios["steered/off"]["phases"]) == 2


def test_draft_lengths_are_told_over_time_from_the_stream_s_beginning():
    gamma = result.as_json(outcome())["gamma"]
    assert gamma["repeats"][0]["samples"] == [
        [0.1, 1, 7, "dflash"],
        [0.2, 1, 5, "eagle3"],
        [1.0, 2, 1, "eagle3"],
    ]
    assert gamma["repeats"][0]["probes"] == 1
    assert gamma["repeats"][0]["phases"] == [
        {"dflash 7": 0.5, "eagle3 5": 0.5},
        {"eagle3 1": 1.0},
    ]
    assert gamma["shares"] == {
        "dflash 7": 0.25,
        "eagle3 1": 0.25,
        "eagle3 5": 0.25,
        "eagle3 7": 0.25,
    }


def test_the_search_for_the_static_draft_length_is_kept():
    found = result.as_json(outcome())["static_selection"]
    assert found == {
        "gamma": 3,
        "tokens_per_second": {"1": [5.0], "2": [8.0, 6.4], "3": [8.0, 10.0]},
        "hindsight_tokens_per_second": 9.0,
        "phases": {"1": [5.0, 5.0], "2": [7.2, 7.2], "3": [9.0, 9.0]},
    }


def test_the_picture_is_a_png_of_some_size(tmp_path):
    path = tmp_path / "new/demo.png"
    picture.draw(outcome(), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert min(struct.unpack(">II", data[16:24])) > 800


def test_the_tables_say_what_was_not_exact(capsys):
    report.show(outcome(), Terminal())
    printed = capsys.readouterr().out
    assert "NOT EXACT: static-3, repeat 2, request 2: token 2 is 9" in printed
    assert "2.250" in printed  # steered / sglang-adaptive
    # Over both repeats: each of the three once.
    assert "dflash 7: 33%  eagle3 5: 33%  eagle3 7: 33%" in printed


def test_a_busy_neighbour_makes_the_speeds_doubtful(capsys):
    quiet = outcome()
    report.show(quiet, Terminal())
    assert "doubtful" not in capsys.readouterr().out
    first = quiet.policies[0]
    disturbed = replace(first, plays=(first.plays[0], replace(first.plays[1], foreign_cores=0.8)))
    busy = replace(quiet, policies=(disturbed, *quiet.policies[1:]))
    report.show(busy, Terminal())
    assert "up to 0.8 cores busy" in capsys.readouterr().out
    assert [r["foreign_cores"] for r in result.as_json(busy)["runs"][0]["repeats"]] == [0.0, 0.8]


def test_the_search_is_a_table_with_its_winner(capsys):
    found = outcome()
    assert found.selection is not None
    report.show_selection(found.selection, found.stream, Terminal())
    printed = capsys.readouterr().out
    assert "the best for the whole stream is γ = 3" in printed
    assert "1 json ×1" in printed
    assert "in hindsight: 9.0 tokens/s, 1.00 × the best static" in printed


def test_the_profile_is_a_table_of_milliseconds(capsys):
    cells = [
        {
            "drafter": "eagle3",
            "gamma": gamma,
            "batch_size": size,
            "step_seconds": 0.001 * (gamma + size),
        }
        for gamma in (0, 3)
        for size in (1, 16)
    ]
    report.show_profile({"cells": cells}, Terminal())
    printed = capsys.readouterr().out
    assert "γ = 3" in printed
    assert "19.0" in printed
