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


def test_strides_and_sd2_are_measured_and_shown(tmp_path: Path):
    found = lab(tmp_path, "tts-strides", "sd2")
    headline, sd2 = found["tts-strides"], found["sd2"]
    assert isinstance(headline, dict)
    assert isinstance(sd2, dict)
    facts = headline["facts"]
    assert facts["same tokens"]
    strides = facts["by price"]["1"]
    assert set(strides) == {"off", "5", "1"}
    assert strides["off"]["updates"] == 0
    # An update takes longer than a step: the engine is never without one, and makes less of them.
    assert strides["1"]["updates"] > strides["5"]["updates"] > 0
    for row in strides.values():
        assert row["tokens/s"]["median"] > 0
    for name in ("distilled", "sd2"):
        assert sd2[name]["same tokens as gamma 0"]
        assert all(row["median"] >= 1 for row in sd2[name]["acceptance length"].values())


def test_an_unknown_part_is_refused():
    done = run_lab("lab.learning", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stdout
