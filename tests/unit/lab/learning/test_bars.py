"""What is made of the seconds that each choice took, and how it is told; no engine."""

import html
from pathlib import Path
from typing import Any

import pytest

from lab.harness.terminal import Terminal
from lab.learning import bars, report
from lab.learning.engines_at_work import LabSetting

# Seconds of four waves.
PLAYED = {
    "off": [4.0, 4.0, 4.0, 4.0],
    "online:20": [4.0, 4.0, 2.0, 2.0],
    "online:5": [4.0, 2.0, 2.0, 2.0],
    bars.OWN: [4.0, 4.0, 2.0, 1.0],
}


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(bars, "_played", lambda *_: PLAYED)
    return bars.bars(LabSetting(tmp_path, tmp_path, quick=False, seeds=2, terminal=Terminal()))


def test_the_choice_is_compared_over_the_whole_stream_and_its_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = found(tmp_path, monkeypatch)["learnable"]
    assert row["best fixed"] == "online:5"
    assert row["tokens/s"]["online:5"]["median"] == 4 * 200 * 4 / 10
    assert row["chosen over best fixed"]["repeats"] == [round(10 / 11, 4)] * 2
    assert row["chosen over best fixed, later"]["median"] == round(4 / 3, 4)
    assert row["chosen over off"]["median"] == round(16 / 11, 4)
    assert row["chosen over off, later"]["median"] == round(8 / 3, 4)


def test_the_report_tells_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
        "bars": found(tmp_path, monkeypatch),
        "machine": {"processor": "a processor", "cores": 2},
        "seconds": 1.0,
        "command": ["python"],
    }
    words = html.unescape(report.page(measured))
    assert words.count("<svg") == 1
    for name in bars.STREAMS:
        assert f"{name}: the sidecar's choice over the best fixed one (online:5) 0.909 (" in words
    assert words.count("second half of the stream 1.333; over off ") == 3
    assert words.count(", then 2.667.") == 3
