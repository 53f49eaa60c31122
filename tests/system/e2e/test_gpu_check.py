"""`make gpu-check` without a GPU: all of it but the size of the models and the graphs."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.core.cost.profile import Profile
from lab.gpu_check.shapes import QWEN3_8B, SMALL
from tests.support.engine import run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    done = run_lab(
        "lab.gpu_check", "--cpu", "--shape", SMALL.name, "--repeats", "1", "--profile-seconds", "8",
        "--output", str(folder), "--keep-profile", str(folder / "profiles"),
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


def test_without_a_gpu_it_says_what_can_be_done(tmp_path: Path):
    done = run_lab("lab.gpu_check", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "--cpu --shape small" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("option", "known"), [("--shape", QWEN3_8B.name), ("--parts", "overhead")])
def test_an_unknown_shape_or_part_is_refused(tmp_path: Path, option: str, known: str):
    done = run_lab("lab.gpu_check", "--cpu", option, "nothing", "--output", str(tmp_path))
    assert done.returncode == 1
    assert known in done.stdout
