"""The lab with small numbers: every part runs on the real engine and ends in the report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cpu_engine.environment import cpu_engine_env

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def lab(folder: Path, *parts: str) -> dict[str, object]:
    forking = [sys.executable, "-m", "tests.support.forking_lab"]
    command = [*forking, "lab.learning", *parts, "--quick"]
    done = subprocess.run(
        [*command, "--output", str(folder)],
        env=cpu_engine_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == len(parts)
    return found


def test_strides_and_sd2_are_measured_and_shown(tmp_path: Path):
    found = lab(tmp_path, "strides", "sd2")
    strides, sd2 = found["strides"], found["sd2"]
    assert isinstance(strides, dict)
    assert isinstance(sd2, dict)
    assert set(strides["by"]) == {"off", "online:5"}
    for row in strides["by"].values():
        assert row["same tokens as without updates"]
        assert row["tokens/s"]["median"] > 0
    for name in ("distilled", "sd2"):
        assert sd2[name]["same tokens as gamma 0"]
        assert all(row["median"] >= 1 for row in sd2[name]["acceptance length"].values())


def test_an_unknown_part_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "lab.learning", "nonsense"],
        env=cpu_engine_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
