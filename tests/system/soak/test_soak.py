"""The soak, in short: SOAK_MINUTES of load, 0.7 unless it says otherwise.

So short a run finds what leaks by the second and what drifts at all; `make soak` takes half an hour
and finds what leaks by the minute.
"""

import json
import os
from pathlib import Path

import pytest

from lab.harness.terminal import Terminal
from tools.soak import report
from tools.soak.run import Options, soak

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.7"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(900 + round(120 * MINUTES)),
]


def test_nothing_grows_and_what_ran_is_on_record(tmp_path: Path) -> None:
    options = Options(MINUTES, tmp_path)
    found = soak(options)
    report.show(found, Terminal())
    report.write(found, options)
    assert {name: lines for name, lines in found.findings.items() if lines} == {}

    # It was a soak at all: everything that should have happened did.
    assert found.load["phases"] >= 2
    assert found.load["aborted"] > 0
    assert found.load["hung_up"] > 0
    assert len({step.gamma for step in found.ran}) >= 2
    assert max(len(step.rows) for step in found.ran) >= 8
    assert len(found.record.sessions) >= 2
    assert found.verdict is not None
    assert found.verdict.decisions > 20
    assert found.looks > 0
    assert {growth.name for growth in found.growths} == {
        "server", "scheduler", "detokenizer", "agent", "sidecar", "redis",
    }  # fmt: skip
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["is_sound"] is True
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
