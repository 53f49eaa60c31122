"""The lab with small numbers: every part runs on the real engine and ends in the report."""

import json
from pathlib import Path

import pytest

from tests.support.engine import run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def lab(folder: Path, *parts: str) -> dict[str, object]:
    done = run_lab("lab.learning", *parts, "--quick", "--output", str(folder))
    assert not done.returncode, done.stdout
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == len(parts)
    return found


def test_parts_and_a_claim_are_measured_and_shown(tmp_path: Path):
    found = lab(tmp_path, "strides", "sd2", "tts-length")
    strides, sd2, claim = found["strides"], found["sd2"], found["tts-length"]
    assert isinstance(strides, dict)
    assert isinstance(sd2, dict)
    assert set(strides["by"]) == {"off", "online:5"}
    for row in strides["by"].values():
        assert row["same tokens as without updates"]
        assert row["tokens/s"]["median"] > 0
    for name in ("distilled", "sd2"):
        assert sd2[name]["same tokens as gamma 0"]
        assert all(row["median"] >= 1 for row in sd2[name]["acceptance length"].values())
    assert isinstance(claim, dict)
    assert [len(row) for row in claim["rows"]] == [len(claim["columns"])] * 4
    facts = claim["facts"]["EAGLE3"]
    assert facts["same tokens"]
    # In lockstep an update of every fifth round lands, whatever the machine is busy with.
    assert facts["updates"][0] >= (facts["rounds"][0] - 8) // 5 - 1


def test_an_unknown_part_is_refused():
    done = run_lab("lab.learning", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stdout
