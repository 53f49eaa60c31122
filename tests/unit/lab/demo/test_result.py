import json

import pytest

from controller.core.engine_spec import Arm
from lab.demo import report
from lab.demo.outcome import as_json
from lab.harness.terminal import Terminal
from tests.unit.lab.demo.outcomes import DILATION, outcome


def test_every_policy_is_one_run_with_its_rate_in_the_models_time():
    runs = json.loads(json.dumps(as_json(outcome())))["runs"]
    assert [run["policy"] for run in runs] == ["off", "static-4", "sglang-adaptive", "steered"]
    assert [run["tokens_per_second"] for run in runs] == [0.5, 1.0, 0.88, 1.5]
    assert [run["exact"] for run in runs] == [True, False, None, True]
    steered = runs[-1]
    assert [repeat["seconds"] for repeat in steered["repeats"]] == [18.0, 18.0]
    assert steered["share_of_oracle"]["median"] == 0.75
    # Eight decode steps of one and of two sequences, and the requests' first tokens.
    assert [phase["median"] for phase in steered["phases"]] == [1.0, 2.0]


def test_latencies_are_told_in_the_models_time():
    steered = as_json(outcome())["runs"][-1]["repeats"][0]
    assert steered["token_milliseconds"]["p99"] == pytest.approx(9000.0 / 8)
    assert steered["latency_seconds"]["p50"] == 9.0
    assert steered["probes"] == 2
    assert steered["shim_microseconds"] == 100.0


def test_ratios_are_named_and_carry_their_spread():
    ratios = as_json(outcome())["ratios"]
    assert set(ratios) == {"steered/off", "steered/static-4", "steered/sglang-adaptive"}
    assert ratios["steered/sglang-adaptive"]["repeats"] == pytest.approx([1.5, 2.0], rel=1e-3)
    assert len(ratios["steered/off"]["phases"]) == 2


def test_draft_lengths_are_told_over_time_from_the_streams_beginning():
    samples = as_json(outcome())["runs"][-1]["repeats"][0]["samples"]
    assert samples[0] == [0.0, 1, 4, "eagle3"]
    assert samples[-1] == [pytest.approx(18.0 - 9.0 / 8), 2, 4, "eagle3"]


def test_it_says_what_is_imposed_and_what_is_real():
    label = as_json(outcome())["label"]
    assert "arXiv 2601.11580" in label["imposed"]
    assert label["dilation"] == DILATION
    assert "ShareGPT" in label["drawn"]["chat"]
    assert "sidecar" in label["real"]


def test_step_times_are_compared_with_the_costs():
    demo_outcome = outcome()
    took = sum(step.seconds for play in demo_outcome.plays["off"] for step in play.decode_steps)
    priced = sum(
        demo_outcome.costs.decode_seconds(
            Arm("eagle3", 0), step.batch_size, step.kv_tokens, warm=True
        )
        for play in demo_outcome.plays["off"]
        for step in play.decode_steps
    )
    assert demo_outcome.time_over_costs("off") == pytest.approx(took / priced)


def test_the_tables_say_what_was_lost_and_what_was_not_exact(capsys):
    report.show(outcome(), Terminal())
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT EXACT: static-4, request 3: token 2 is 9, plain decoding gave 7" in printed
    assert "NOT all of them equal" in printed
    assert "4.2% of the time (waiting for information 1.0%, probing 2.0%" in printed
    assert "4: 100%" in printed
