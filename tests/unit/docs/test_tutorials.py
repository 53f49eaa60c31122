"""Runs the Python blocks of each tutorial as one program, and compares what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import sidecar_process

ROOT = Path(__file__).resolve().parents[3]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PATIENCE_SECONDS = 120


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(page: Path, folder: Path, **variables: str) -> str:
    program = folder / "program.py"
    program.write_text("\n\n".join(blocks(page, "python")))
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    done = subprocess.run(
        [sys.executable, "-W", "error", program], cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": path} | variables,
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["estimator", "peer-policy"])
def test_a_tutorial_without_a_sidecar_prints_what_it_says(name: str, tmp_path: Path):
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    assert [run(page, tmp_path)] == blocks(page, "text")


def test_the_shim_of_the_tutorial_is_steered_by_a_real_sidecar(tmp_path: Path):
    page = ROOT / "docs" / "tutorials" / "shim.md"
    with sidecar_process(tmp_path) as sidecar:
        printed = run(page, tmp_path, SPECULATION_SIDECAR=sidecar.address)
    assert [printed] == blocks(page, "text")


def test_every_tutorial_is_run_here():
    assert [page.stem for page in TUTORIALS] == ["estimator", "peer-policy", "shim"]
