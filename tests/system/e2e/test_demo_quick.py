"""The demo as CI plays it: the real SGLang four times over, a real sidecar, real gRPC.

Nothing here depends on how fast the machine is.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

POLICIES = ["off", "static-2", "sglang-adaptive", "steered"]


@dataclass(frozen=True)
class Ran:
    """The demo's end."""

    printed: str
    output: Path
    result: dict[str, Any]

    def run(self, policy: str) -> dict[str, Any]:
        return next(run for run in self.result["runs"] if run["policy"] == policy)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    output = tmp_path_factory.mktemp("demo")
    demo = run_lab("lab.demo", "--quick", "--output", str(output))
    print(demo.stdout)
    assert demo.returncode == 0, demo.stdout
    return Ran(demo.stdout, output, json.loads((output / "result.json").read_text()))


def test_all_four_policies_gave_exactly_the_same_tokens(quick: Ran):
    assert [run["policy"] for run in quick.result["runs"]] == POLICIES
    for run in quick.result["runs"]:
        assert run["exact"] is True
        assert [repeat["mismatches"] for repeat in run["repeats"]] == [[]]


def test_every_policy_has_its_rate_by_stream_and_by_phase(quick: Ran):
    phases = len(quick.result["stream"])
    for run in quick.result["runs"]:
        assert run["tokens_per_second"] > 0
        assert len(run["phases"]) == phases
        assert all(phase["median"] > 0 for phase in run["phases"])
        (repeat,) = run["repeats"]
        assert repeat["seconds"] > 0
        assert len(repeat["phases"]) == phases


def test_steered_is_compared_with_each_of_the_others(quick: Ran):
    ratios = quick.result["ratios"]
    assert set(ratios) == {f"steered/{policy}" for policy in POLICIES[:-1]}
    for policy in POLICIES[:-1]:
        expected = (
            quick.run("steered")["tokens_per_second"] / quick.run(policy)["tokens_per_second"]
        )
        assert ratios[f"steered/{policy}"]["median"] == pytest.approx(expected, rel=1e-2)


def test_the_steered_engine_really_moved_its_draft_length(quick: Ran):
    gamma = quick.result["gamma"]
    assert len([value for value, share in gamma["shares"].items() if share > 0]) >= 2
    (repeat,) = gamma["repeats"]
    assert len(repeat["samples"]) >= 10
    assert max(sample[1] for sample in repeat["samples"]) > 8
    assert repeat["unsteered"] == 0


def test_drafting_gained_tokens_and_plain_decoding_did_not(quick: Ran):
    assert quick.run("off")["acceptance_length"] == 1.0
    for policy in POLICIES[1:]:
        assert 1.0 < quick.run(policy)["acceptance_length"] < 8.0
        assert set(quick.run(policy)["acceptance_length_by_domain"]) == {
            "code", "prose", "json", "csv",
        }  # fmt: skip


def test_costs_came_from_a_profile_that_was_measured_here(quick: Ran):
    profile = json.loads((quick.output / "profile.json").read_text())
    assert {cell["gamma"] for cell in profile["cells"]} == {0, 1, 2, 3, 5, 7}
    assert quick.result["profile"]["profile_id"]


def test_where_and_with_what_it_ran_is_told(quick: Ran):
    assert quick.result["machine"]["cores"] >= 1
    assert quick.result["versions"]["sglang"][0].isdigit()
    assert "lab.demo" in quick.result["command"]


def test_the_picture_and_the_logs_are_there(quick: Ran):
    assert (quick.output / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name in (*POLICIES, "sidecar", "profile"):
        assert (quick.output / "logs" / f"{name}.log").exists()


def test_a_person_sees_the_comparison(quick: Ran):
    for text in ("Whole stream", "By phase", "Milliseconds of a step", *POLICIES):
        assert text in quick.printed


def test_a_demo_that_is_ended_takes_its_engines_along(tmp_path: Path):
    demo = subprocess.Popen(
        [sys.executable, "-m", "lab.demo", "--quick", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        family = _family_with_engines(demo.pid, tmp_path)
        os.kill(demo.pid, signal.SIGTERM)
        demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []


def _family_with_engines(pid: int, output: Path) -> list[psutil.Process]:
    """All descendants, once the engines have begun to say something."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        logs = [output / "logs" / f"{policy}.log" for policy in ("steered", "off")]
        if all(log.exists() and log.stat().st_size > 0 for log in logs):
            return psutil.Process(pid).children(recursive=True)
        time.sleep(0.1)
    raise AssertionError("the engines never began")
