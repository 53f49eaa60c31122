"""`controller simulate` as a person runs it: files in, tables out, one line when wrong."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from simulator.commands.simulate import simulate

app = typer.Typer()
app.command()(simulate)

ARRIVALS = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.0000000,374,44
2024-05-12 00:00:00.3100000,396,109
2024-05-12 00:00:01.2000000,879,55
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [
        f"{b},{width},{0.006 + 0.0005 * (width > 1) + 2e-5 * b * width}"
        for b in (1, 8, 32)
        for width in (1, 2, 4, 6)
    ]
    Path("costs.csv").write_text("\n".join(["batch_size,num_draft_tokens,step_seconds", *rows]))
    acceptance_trace = [
        {"id": str(i), "prompt_token_ids": [1] * 50, "generated_token_ids": [1] * 60,
         "acc_eagle": {"acc_len": [1 + (i + p) % 5 for p in range(60)]},
         "acc_ngram": {"acc_len": [1 + (p % 7 == 0) for p in range(60)]}}
        for i in range(12)
    ]  # fmt: skip
    Path("bank.jsonl").write_text("\n".join(json.dumps(entry) for entry in acceptance_trace))
    Path("arrivals.csv").write_text(ARRIVALS)


def run(*arguments):
    return CliRunner().invoke(app, [*arguments, "--processes", "1"], catch_exceptions=False)


QUICK = ("--tokens", "200", "--seeds", "1")


def test_a_bank_on_a_table_gives_the_agreed_json():
    done = run("--acceptance", "bank.jsonl", "--cost", "costs.csv", "--concurrency", "1,8", *QUICK,
               "--json", "out.json", "--html", "out.html")  # fmt: skip
    assert done.exit_code == 0, done.output
    body = json.loads(Path("out.json").read_text())
    assert [s["name"] for s in body["scenarios"]] == [
        "closed/B=1", "closed/B=8", "closed/moving",
    ]  # fmt: skip
    for scenario in body["scenarios"]:
        by_name = {p["name"]: p for p in scenario["policies"]}
        assert {"controller", "oracle", "off", "static-3", "vllm-schedule"} <= set(by_name)
        assert by_name["off"]["ratio_to_off"] == pytest.approx(1.0)
        assert by_name["oracle"]["ratio_to_oracle"] == pytest.approx(1.0)
        assert by_name["controller"]["ratio_to_best_static"] > 0.8
    assert Path("out.html").read_text().startswith("<!doctype html>")
    assert "controller" in done.output


def test_arrivals_and_named_policies():
    done = run("--acceptance", "bank.jsonl", "--drafter", "ngram", "--cost", "costs.csv",
               "--arrivals", "arrivals.csv", "--prefill", "chunked", "--seeds", "1",
               "--policy", "controller", "off", "--json", "out.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    body = json.loads(Path("out.json").read_text())
    assert [s["name"] for s in body["scenarios"]] == ["arrivals/arrivals"]
    assert {p["name"] for p in body["scenarios"][0]["policies"]} == {"controller", "off"}


def test_equal_seeds_give_equal_results():
    arguments = ("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--concurrency", "4",
                 *QUICK, "--policy", "controller,tide", "--seed", "9")  # fmt: skip
    results = []
    for name in ("a.json", "b.json"):
        assert run(*arguments, "--json", name).exit_code == 0
        scenarios = json.loads(Path(name).read_text())["scenarios"]
        for scenario in scenarios:
            for policy in scenario["policies"]:
                del policy["decision_microseconds"]
        results.append(scenarios)
    assert results[0] == results[1]


def test_a_published_cost_and_a_part_of_the_suite():
    done = run("--suite", "standard/tide-qwen3-235b/alpha=0.9/B=16", "--seeds", "1")
    assert done.exit_code == 0, done.output
    assert "stationary/tide-qwen3-235b/alpha=0.9/B=16" in done.output


SCENARIO = """\
name: mine
cost: {table: {mtp: costs.csv}}
traffic: {code: {geometric: {mtp: 0.7}}}
phases: [{kind: code, batch: 8, tokens: 200}]
"""


def test_scenarios_come_from_files():
    Path("mine.yaml").write_text(SCENARIO)
    Path("other.yaml").write_text(SCENARIO.replace("mine", "other"))
    done = run("--scenario", "mine.yaml", "--scenario", "other.yaml", "--seeds", "1",
               "--policy", "controller", "--json", "out.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    body = json.loads(Path("out.json").read_text())
    assert [(s["name"], s["seeds"]) for s in body["scenarios"]] == [("mine", 1), ("other", 1)]


def test_a_scenario_of_the_suite_can_be_dumped_changed_and_run():
    done = run("--dump-scenario", "stationary/tide-qwen3-235b/alpha=0.9/B=16")
    assert done.exit_code == 0, done.output
    Path("mine.yaml").write_text(done.stdout.replace("tokens: 5000", "tokens: 100"))
    again = run("--scenario", "mine.yaml", "--seeds", "1", "--policy", "controller")
    assert again.exit_code == 0, again.output
    assert "stationary/tide-qwen3-235b/alpha=0.9/B=16" in again.output


def test_switches_and_catching_up_have_their_price():
    rates = []
    for prices in (
        ("--switch-seconds", "0", "--catch-up-seconds", "0", "--catch-up-pass-seconds", "0"),
        ("--switch-seconds", "0.05", "--catch-up-seconds", "0", "--catch-up-pass-seconds", "0"),
        ("--switch-seconds", "0", "--catch-up-seconds", "0.01", "--catch-up-pass-seconds", "0.05"),
    ):
        done = run("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--concurrency", "4",
                   *QUICK, *prices, "--policy", "bandit-ucb", "--json", "out.json")  # fmt: skip
        assert done.exit_code == 0, done.output
        [policy] = json.loads(Path("out.json").read_text())["scenarios"][0]["policies"]
        rates.append(policy["tokens_per_second"])
    assert max(rates[1:]) < 0.97 * rates[0]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((), "--acceptance: is needed"),
        (("--scenario", "no.yaml"), "no.yaml: No such file"),
        (("--scenario", "bad.yaml"), "bad.yaml:4: phases[0].batch: "),
        (("--scenario", "fine.yaml", "--scenario", "fine.yaml"), "'mine' is the name of two"),
        (("--dump-scenario", "burst"), "'burst' is not in the suite; there are: "),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--profile-noise", "-1"),
         "--profile-noise"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--switch-seconds", "-1"),
         "switch_seconds"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--catch-up-seconds", "-1"),
         "--catch-up-seconds"),
        (("--acceptance", "geometric:0.6"), "--cost"),
        (("--acceptance", "geometric:0.6", "--cost", "h100-lama"), "h100-llama3.1-8b"),
        (("--acceptance", "geometric:0.6", "--cost", "mtp=no.csv"), "'no.csv' is neither a file"),
        (("--acceptance", "geometric:1.6", "--cost", "costs.csv"), "not a probability"),
        (("--acceptance", "nowhere.jsonl", "--cost", "costs.csv"), "nowhere.jsonl"),
        (("--acceptance", "geometric:0.6", "--cost", "holes.csv"), "holes.csv:3"),
        (("--acceptance", "geometric:0.6", "--cost", "nan.csv"), "nan.csv:2"),
        (("--acceptance", "geometric:0.6", "--cost", "zero.csv"), "zero.csv:2"),
        (("--acceptance", "bad.jsonl", "--cost", "costs.csv"), "bad.jsonl:2"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--arrivals", "back.csv"),
         "back.csv:3"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--policy", "magic"), "'magic'"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--concurrency", "64"),
         "[1, 32]"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--concurrency", "x"), "'x'"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--prefill", "x"), "--prefill"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--json", "no/o.json"),
         "directory does not exist"),
        (("--acceptance", "geometric:0.6", "--cost", "costs.csv", "--profile-error", "nan"),
         "--profile-error"),
        (("--suite", "other"), "'other'"),
        (("--suite", "standard/nothing"), "'nothing'"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_and_exit_code_two(arguments, fault):
    head = "batch_size,num_draft_tokens,step_seconds\n"
    Path("fine.yaml").write_text(SCENARIO)
    Path("bad.yaml").write_text(SCENARIO.replace("batch: 8", "batch: 0"))
    Path("holes.csv").write_text(head + "1,1,0.01\n1,2,\n")
    Path("nan.csv").write_text(head + "1,1,nan\n")
    Path("zero.csv").write_text(head + "1,1,0\n")
    Path("bad.jsonl").write_text(Path("bank.jsonl").read_text().splitlines()[0] + "\n{oops\n")
    lines = ARRIVALS.splitlines()
    Path("back.csv").write_text("\n".join([lines[0], lines[2], lines[1]]))
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert fault in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
