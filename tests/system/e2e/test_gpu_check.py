"""`make gpu-check` without a GPU: all of it but the size of the models; its graphs are emulated."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from controller.core.cost.profile import Profile
from lab.gpu_check import acceptance
from lab.gpu_check.shapes import QWEN3_8B, SMALL
from tests.support.engine import ROOT, install_plugin, run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


GRAPHS = {"CPU_ENGINE_GRAPHS": "1"}
# What engines have that accept drafts without weights; SGLang reads it while it is imported.
ACCEPTING = "SGLANG_SIMULATE_ACC_LEN=1"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    done = run_lab(
        "lab.gpu_check", "--cpu", "--shape", SMALL.name, "--repeats", "1", "--profile-seconds", "8",
        "--parts", "all",
        "--output", str(folder), "--keep-profile", str(folder / "profiles"),
        environment=GRAPHS, imported_with=("", ACCEPTING),
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def found(output: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((output / "result.json").read_text())
    return document


def test_every_arm_ran(found: dict[str, Any]):
    ran = [(arm["drafter"], arm["gamma"]) for arm in found["arms"]]
    assert ran == list(SMALL.arms())
    assert all(arm["steps"] > 0 for arm in found["arms"])
    assert found["eager_steps"] == 0


def test_drafts_were_accepted_by_the_curve(found: dict[str, Any]):
    """p of each drafter, and i.i.d.: gamma 3 gives 1 + p + p^2 + p^3 tokens a verification."""
    lengths = {(arm["drafter"], arm["gamma"]): arm["acceptance_length"] for arm in found["arms"]}
    assert lengths["eagle3", 0] == 1.0
    for (drafter, gamma), length in lengths.items():
        p = found["acceptance"][drafter]
        assert length == pytest.approx(sum(p**k for k in range(gamma + 1)), rel=0.12)


def test_the_profile_is_one_that_a_sidecar_takes(output: Path):
    (path,) = (output / "profiles").iterdir()
    profile = Profile.from_json(path.read_text())
    cells = {(cell.drafter, cell.gamma, cell.batch_size) for cell in profile.cells}
    arms = set(SMALL.arms())
    assert cells == {(*arm, size) for arm in arms for size in SMALL.batch_sizes}


def test_every_price_was_measured(found: dict[str, Any]):
    assert found["switch"]["switches"] > 10
    assert set(found["asleep"]) == {str(load.concurrency) for load in SMALL.loads}
    assert found["pinned"]["gamma"] == SMALL.static_gamma
    assert set(found["startup"]["seconds"]) == {"steered", "off", "static", "pinned"}
    assert set(found["startup"]["prepared"]) == {"0", "1"}
    for ratio in (found["pinned"], *found["asleep"].values(), *found["steered"]["over"]):
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]


def test_the_findings_can_be_read(output: Path):
    text = (output / "findings.md").read_text()
    assert "no GPU" in text
    for line in ("| dflash 3 |", "| B=1 | B=4 |", "asleep at B = 4"):
        assert line in text


def test_random_arms_gave_plain_decodings_tokens(found: dict[str, Any]):
    exact = found["exact"]
    assert (exact["wrong"], exact["rounding"]) == (0, 0)
    assert exact["tokens"] > 0
    # Plans come for every few steps on a busy machine.
    assert len(exact["arms"]) > 3


def test_a_drafter_learnt_while_it_served(found: dict[str, Any]):
    learning = found["learning"]
    assert learning["wrong"] == 0
    assert learning["lost"] == []
    assert learning["online"]["updates"] > 0
    assert len(learning["acceptance_lengths"]) == 2
    assert learning["syncs"] is None  # there is no CUDA


def test_every_arm_was_watched_for_eager_steps(found: dict[str, Any]):
    ran = {(arm["drafter"], arm["gamma"]) for arm in found["graphs"]["arms"]}
    assert ran >= set(SMALL.arms())
    assert set(found["graphs"]["passes"]) == {"verification", "draft", "draft_extend", "block"}
    assert found["startup"]["without_graphs"] == []
    assert found["graphs"]["syncs"] is None  # there is no CUDA


def test_the_page_has_a_verdict_for_each_part(output: Path):
    text = (output / "page.md").read_text()
    for line in (
        "| exact | passed |",
        "| learning | passed |",
        "| graphs | passed |",
        "| costs | measured |",
        "B=4",
    ):
        assert line in text


def test_a_wrong_token_fails_the_check(tmp_path: Path):
    """Accepted drafts are all overwritten with one token, wherever anything is speculated."""
    sabotage = acceptance.environment(tmp_path / "sabotage")
    sabotage["PYTHONPATH"] += os.pathsep + str(ROOT / "proto")
    done = run_lab(
        "lab.gpu_check", "--cpu", "--shape", SMALL.name, "--parts", "exact",
        "--output", str(tmp_path), environment=sabotage, imported_with=(ACCEPTING,),
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 1
    exact = json.loads((tmp_path / "result.json").read_text())["exact"]
    assert exact["wrong"] > 0
    first = exact["differences"][0]
    assert first["found"] == 100
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
        "--output", str(tmp_path), environment=sabotage, imported_with=(ACCEPTING,),
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 3
    found = json.loads((tmp_path / "result.json").read_text())
    eager = {(arm["drafter"], arm["gamma"]): arm["eager_steps"] for arm in found["graphs"]["arms"]}
    # A chain of one token needs no pass of its own.
    assert {arm for arm, steps in eager.items() if steps} == {
        (drafter, gamma) for drafter, gamma in SMALL.arms() if drafter == "eagle3" and gamma > 1
    }
    passes = found["graphs"]["passes"]
    # A step that was launched beside the last one of a play is in no play's reports.
    assert passes["draft"] >= sum(eager.values())
    assert (passes["verification"], passes["draft_extend"], passes["block"]) == (0, 0, 0)
    page = (tmp_path / "page.md").read_text()
    assert "| graphs | FAILED |" in page
    assert "eagle3 gamma 3" in page


def test_without_a_gpu_it_says_what_can_be_done(tmp_path: Path):
    done = run_lab("lab.gpu_check", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "--cpu --shape small" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("option", "known", "code"), [("--shape", QWEN3_8B.name, 1), ("--parts", "overhead", 2)]
)
def test_an_unknown_shape_or_part_is_refused(tmp_path: Path, option: str, known: str, code: int):
    done = run_lab("lab.gpu_check", "--cpu", option, "nothing", "--output", str(tmp_path))
    assert done.returncode == code
    assert known in done.stdout
