"""docs/metrics.md is what the code says."""

import subprocess
import sys
from pathlib import Path

from tests.support.service_harness import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]


def check(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/metrics_reference.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_the_reference_is_up_to_date():
    result = check("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_reference_that_says_something_else_is_noticed(tmp_path: Path):
    page = tmp_path / "metrics.md"
    page.write_text((ROOT / "docs" / "metrics.md").read_text().replace("gauge", "counter", 1))
    result = check("--check", "--file", page)
    assert result.returncode == 1
    assert "metrics.md is not what the code says" in result.stdout
    assert check("--file", page).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "metrics.md").read_text()
