"""`make demo-gpu` without a GPU: all of it, with a small shape and a short day on this processor.

Graphs and the overlap schedule are emulated, so that steps are launched before the last one's
tokens have been read.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.core.cost.profile import Profile
from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId
from lab.cpu_engine.pace.step_log import LogPart, read_log
from lab.demo.gpu.plan import SETTINGS
from lab.gpu_check.shapes import SMALL
from lab.paced.traffic import own_curves
from tests.support.engine import MODES, run_lab, start_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

# The shortest budget of the profile that still measures every arm.
ARGUMENTS = ("--cpu", "--minutes", "15", "--profile-seconds", "4")
SETTING = SETTINGS[SMALL.name]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo-gpu")
    done = run_lab(
        "lab.demo.gpu", *ARGUMENTS, "--output", str(folder), environment=MODES["overlapped"]
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def day_results(output: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((output / "result.json").read_text())
    return document


def logs(output: Path) -> dict[str, LogPart]:
    """Policy -> its engine's log, the warm-up included."""
    return {path.stem: read_log(path) for path in (output / "steps").iterdir()}


def verifications(rid: str, gamma: int) -> int:
    """How many steps a request takes by its draws."""
    request = RequestId.parse(rid)
    assert request is not None
    drawn = DrawnAcceptance(own_curves()).accepted(request, "eagle3")
    position = steps = 0
    while position < request.output_tokens - 1:
        position += min(int(drawn[position]), gamma) + 1
        steps += 1
    return steps


def test_four_policies_played_the_same_day_and_nothing_was_left_out(day_results: dict[str, Any]):
    policies = [run["policy"] for run in day_results["runs"]]
    static = policies[1]
    assert policies == ["off", static, "sglang-adaptive", "steered"]
    assert static in {f"static-{gamma}" for gamma in SETTING.gammas if gamma}
    assert (day_results["complete"], day_results["stopped"], day_results["not_played"]) == (
        True,
        "",
        {},
    )
    requests = SETTING.stream(day_results["share_of_answers"]).requests
    assert sum(phase["requests"] for phase in day_results["stream"]["phases"]) == requests


def test_each_has_rates_shares_and_times(day_results: dict[str, Any]):
    for run in day_results["runs"]:
        play = run["repeats"][0]
        assert run["tokens_per_second"] > 0
        assert all(share > 0 for share in run["phase_shares"])
        assert len(run["phases"]) == len(SETTING.plans)
        for times in (play["token_milliseconds"], play["latency_seconds"]):
            assert 0 < times["p50"] <= times["p99"]
    assert set(day_results["ratios"]) == {
        f"steered/{run['policy']}" for run in day_results["runs"] if run["policy"] != "steered"
    }


def test_every_policy_met_the_same_luck_although_results_were_read_late(output: Path):
    """A fixed draft length takes exactly the steps that the draws say, and one row too much at the
    end of each request at most: it was launched before the end was read.
    """
    checked = 0
    for policy, log in logs(output).items():
        if policy != "off" and not policy.startswith("static-"):
            continue
        gamma = 0 if policy == "off" else int(policy.removeprefix("static-"))
        requests = [r for r in log.requests if RequestId.parse(r.rid) is not None]
        expected = sum(verifications(request.rid, gamma) for request in requests)
        rows = sum(sum(n for kind, n in step.kinds.items() if kind)
                   for step in log.steps if step.is_decode)  # fmt: skip
        assert expected <= rows <= expected + len(requests)
        assert {step.gamma for step in log.steps if step.is_decode} == {gamma}
        checked += 1
    assert checked == 2


def test_the_oracle_is_computed_from_the_costs_that_were_measured_here(
    day_results: dict[str, Any], output: Path
):
    profile = Profile.from_json((output / "profile.json").read_text())
    assert {(cell.gamma, cell.batch_size) for cell in profile.cells} == {
        (gamma, size) for gamma in SETTING.gammas for size in (1, SETTING.max_batch_size)
    }
    assert "measured on" in day_results["label"]["oracle"]
    assert day_results["label"]["measured"] == "the duration of every step: nothing is imposed"
    assert day_results["oracle"][0]["tokens_per_second"] > 0
    assert day_results["graph_sizes"] == list(SETTING.graph_sizes)
    assert len(day_results["oracle"][0]["arms"]) == len(SETTING.plans)


def test_the_steered_engine_was_steered(day_results: dict[str, Any], output: Path):
    steps = [step for step in logs(output)["steered"].steps if step.is_decode]
    # It was profiled, too.
    assert {step.gamma for step in steps} == set(SETTING.gammas)
    assert any(step.steered for step in steps)
    steered = day_results["runs"][-1]["repeats"][0]
    assert steered["unsteered"] < steered["steps"]


def test_the_page_can_be_read_and_the_picture_drawn_from_the_result(output: Path):
    text = (output / "page.md").read_text()
    for line in ("The run came to its end.", "| steered |", "| burst ×4 |", "| play | off |"):
        assert line in text
    drawn = run_lab("lab.demo.picture", str(output / "result.json"))
    assert drawn.returncode == 0, drawn.stdout
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_told_to_end_leaves_what_it_has_and_no_engine(tmp_path: Path):
    demo = start_lab("lab.demo.gpu", *ARGUMENTS, "--output", str(tmp_path))
    try:
        _wait_for_a_play(demo, tmp_path)
        family = [*psutil.Process(demo.pid).children(recursive=True), *_writers(tmp_path)]
        os.kill(demo.pid, signal.SIGTERM)
        demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["complete"] is False
    assert document["stopped"] == "the run was told to end"
    assert document["runs"][-1]["policy"] == "steered"
    text = (tmp_path / "page.md").read_text()
    assert "**The run is incomplete**: the run was told to end." in text
    assert "| steered |" in text


def _wait_for_a_play(demo: Any, folder: Path) -> None:
    """Returns once a result has a play in it."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and demo.poll() is None:
        path = folder / "result.json"
        if path.exists() and "runs" in json.loads(path.read_text()):
            return
        time.sleep(0.2)
    raise AssertionError("nothing was played")


def _writers(folder: Path) -> list[psutil.Process]:
    """Who writes a log: an engine is the child of whoever has imported SGLang."""
    unexpected_writes = []
    for process in psutil.process_iter():
        try:
            if any(Path(f.path).is_relative_to(folder) for f in process.open_files()):
                unexpected_writes.append(process)
        except psutil.Error:
            continue
    assert unexpected_writes
    return unexpected_writes
