"""The lab with small numbers: every part runs on the real engine and ends in the report."""

import json
from pathlib import Path

import pytest

from tests.support.engine import run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def lab(folder: Path, *parts: str) -> dict[str, object]:
    done = run_lab("lab.learning", *parts, "--quick", "--output", str(folder))
    assert not done.returncode, done.stdout
    results: dict[str, object] = json.loads((folder / "result.json").read_text())
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == len(parts)
    return results


@pytest.mark.nightly
def test_claims_are_measured_and_shown(tmp_path: Path):
    results = lab(tmp_path, "tts-strides", "tts-length")
    paced, claim = results["tts-strides"], results["tts-length"]
    assert isinstance(paced, dict)
    assert paced["facts"]["same tokens"]
    strides = paced["facts"]["by price"]["1"]
    assert set(strides) == {"off", "5", "1"}
    assert strides["off"]["updates"] == 0
    # They land at the imposed moment, whatever the machine is busy with.
    assert strides["1"]["updates"] > strides["5"]["updates"] > 0
    for row in strides.values():
        assert row["tokens/s"]["median"] > 0
    assert isinstance(claim, dict)
    assert [len(row) for row in claim["rows"]] == [len(claim["columns"])] * 4
    facts = claim["facts"]["EAGLE3"]
    assert facts["same tokens"]
    # In lockstep an update of every fifth round lands, whatever the machine is busy with.
    assert facts["updates"][0] >= (facts["rounds"][0] - 8) // 5 - 1


@pytest.mark.nightly
def test_a_claim_is_counted_and_shown(tmp_path: Path):
    done = run_lab("lab.learning", "sd2-offsets", "--quick", "--output", str(tmp_path))
    assert not done.returncode, done.stdout
    offsets = json.loads((tmp_path / "result.json").read_text())["sd2-offsets"]
    assert offsets["claim"] in (tmp_path / "report.html").read_text()
    assert [row[0] for row in offsets["rows"]] == list(offsets["facts"])
    for row in offsets["facts"].values():
        assert all(0 <= cell["median"] <= 8 for cell in row.values())


@pytest.mark.nightly
def test_tides_claims_are_looked_at_on_one_engines_signals(tmp_path: Path):
    parts = ("tide-domains", "tide-matrix", "tide-time")
    done = run_lab("lab.learning", *parts, "--quick", "--output", str(tmp_path))
    assert not done.returncode, done.stdout
    results = json.loads((tmp_path / "result.json").read_text())
    lengths = results["tide-matrix"]["facts"]["acceptance length"]
    assert set(lengths) == {"json", "csv"}
    for row in lengths.values():
        assert set(row) == {"as loaded", "json", "csv"}
        assert all(1 <= length["median"] <= 4 for length in row.values())
    once, again = (
        results["tide-time"]["facts"][f"prefill {often}"]["median"]
        for often in ("once", "in each epoch")
    )
    assert 1 < once < again
    served = results["tide-domains"]["facts"]["served"]
    assert all(sum(domain["accepted"][0]) > 50 for domain in served.values())
    assert len(results["tide-domains"]["rows"]) == 3


def test_an_unknown_part_is_refused():
    done = run_lab("lab.learning", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stdout
