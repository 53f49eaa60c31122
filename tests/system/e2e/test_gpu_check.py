"""`make gpu-check` without a GPU: what it refuses, what fails it, and how it stops."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from lab.gpu_check import acceptance, plugins
from lab.gpu_check.shapes import QWEN3_8B, SMALL
from tests.support.engine import ROOT, install_plugin, run_lab, start_lab
from tests.support.eventually import eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


GRAPHS = {"CPU_ENGINE_GRAPHS": "1"}


def files_written_to(folder: Path) -> list[str]:
    """The files of the folder that a process has open: an engine's log, say."""
    written_files = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it ended meanwhile
            if (file := str(link.readlink())).startswith(str(folder)):
                written_files.append(file)
    return written_files


@pytest.mark.nightly
def test_a_wrong_token_fails_the_check(tmp_path: Path):
    """Accepted drafts are all overwritten with one token, wherever anything is speculated."""
    sabotage = plugins.environment(tmp_path / "sabotage") | acceptance.variables()
    sabotage["PYTHONPATH"] += os.pathsep + str(ROOT / "proto")
    done = run_lab(
        "lab.gpu_check", "--cpu", "--shape", SMALL.name, "--parts", "exact",
        "--output", str(tmp_path), environment=sabotage,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 1
    exact = json.loads((tmp_path / "result.json").read_text())["exact"]
    assert exact["wrong"] > 0
    first = exact["differences"][0]
    assert first["actual"] == 100
    assert "eagle3 3" in first["arm"]
    page = (tmp_path / "page.md").read_text()
    assert "| exact | FAILED |" in page
    assert f"expected token {first['expected']}, found 100" in page


def test_a_draft_without_its_graph_fails_the_check(tmp_path: Path):
    (tmp_path / "refused").write_text("draft")
    target = "tests.system.engine.sabotage:refuse_graphs_on_demand"
    plugins = install_plugin(tmp_path / "plugins", target, name="zz_sabotage")
    sabotage = GRAPHS | {
        "SABOTAGE_FILE": str(tmp_path / "refused"),
        "PYTHONPATH": os.pathsep.join([str(plugins), str(ROOT), str(ROOT / "proto")]),
    }
    done = run_lab(
        "lab.gpu_check", "--cpu", "--shape", SMALL.name, "--parts", "graphs",
        "--output", str(tmp_path), environment=sabotage,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 3
    result = json.loads((tmp_path / "result.json").read_text())
    eager = {(arm["drafter"], arm["gamma"]): arm["eager_steps"] for arm in result["graphs"]["arms"]}
    # A chain of one token needs no pass of its own.
    assert {arm for arm, steps in eager.items() if steps} == {
        (drafter, gamma) for drafter, gamma in SMALL.arms() if drafter == "eagle3" and gamma > 1
    }
    passes = result["graphs"]["passes"]
    # A step that was launched beside the last one of a play is in no play's reports.
    assert passes["draft"] >= sum(eager.values())
    assert (passes["verification"], passes["draft_extend"], passes["block"]) == (0, 0, 0)
    page = (tmp_path / "page.md").read_text()
    assert "| graphs | FAILED |" in page
    assert "eagle3 gamma 3" in page


def test_told_to_stop_it_leaves_its_results_and_no_engine(tmp_path: Path):
    options = ("--cpu", "--shape", SMALL.name, "--parts", "exact,costs", "--output", str(tmp_path))
    with start_lab("lab.gpu_check", *options) as process:
        eventually(
            lambda: any(log.endswith(".log") for log in files_written_to(tmp_path)),
            description="an engine's log",
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"Stopped.  The results so far are in {tmp_path / 'page.md'}." in output
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["stopped"] == "SystemExit: 143"
    assert "The check was stopped" in (tmp_path / "page.md").read_text()
    assert files_written_to(tmp_path) == []


def test_without_a_gpu_it_says_what_can_be_done(tmp_path: Path):
    done = run_lab("lab.gpu_check", "--output", str(tmp_path))
    assert done.returncode == 2
    output = " ".join(done.stdout.split())
    assert "--emulated" in output
    assert "--cpu --shape small" in output


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("--shape", QWEN3_8B.name),
        ("--parts", "overhead"),
        ("--scale", "quarter"),
        ("--graph-sizes", "1,4,16"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(tmp_path: Path, option: str, known: str):
    done = run_lab("lab.gpu_check", "--cpu", option, "nothing", "--output", str(tmp_path))
    assert done.returncode == 2
    assert known in done.stdout
    assert not (tmp_path / "result.json").exists()


def test_the_plan_starts_nothing(tmp_path: Path):
    done = run_lab("lab.gpu_check", "--plan", "--minutes", "8", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "Together" in done.stdout
    assert "The budget is" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_plan_says_what_does_not_fit():
    done = run_lab("lab.gpu_check", "--plan", "--minutes", "2")
    assert done.returncode == 0, done.stdout
    assert "The budget is 120 s: what does not fit is left out" in done.stdout
