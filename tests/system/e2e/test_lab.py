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
    found = lab(tmp_path, "strides", "tts-length")
    strides, claim = found["strides"], found["tts-length"]
    assert isinstance(strides, dict)
    assert set(strides["by"]) == {"off", "online:5"}
    for row in strides["by"].values():
        assert row["same tokens as without updates"]
        assert row["tokens/s"]["median"] > 0
    assert isinstance(claim, dict)
    assert [len(row) for row in claim["rows"]] == [len(claim["columns"])] * 4
    facts = claim["facts"]["EAGLE3"]
    assert facts["same tokens"]
    # In lockstep an update of every fifth round lands, whatever the machine is busy with.
    assert facts["updates"][0] >= (facts["rounds"][0] - 8) // 5 - 1


def test_a_claim_is_counted_and_shown(tmp_path: Path):
    done = run_lab("lab.learning", "sd2-offsets", "--quick", "--output", str(tmp_path))
    assert not done.returncode, done.stdout
    found = json.loads((tmp_path / "result.json").read_text())["sd2-offsets"]
    assert found["claim"] in (tmp_path / "report.html").read_text()
    assert [row[0] for row in found["rows"]] == list(found["facts"])
    for row in found["facts"].values():
        assert all(0 <= cell["median"] <= 8 for cell in row.values())


def test_an_unknown_part_is_refused():
    done = run_lab("lab.learning", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stdout
