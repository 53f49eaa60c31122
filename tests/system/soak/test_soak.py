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
    soak_result = soak(options)
    report.show(soak_result, Terminal())
    report.write(soak_result, options)
    assert {name: lines for name, lines in soak_result.findings.items() if lines} == {}

    # It was a soak at all: everything that should have happened did.
    assert soak_result.load["phases"] >= 2
    assert soak_result.load["aborted"] > 0
    assert soak_result.load["hung_up"] > 0
    assert len({step.gamma for step in soak_result.executed_steps}) >= 2
    assert max(len(step.rows) for step in soak_result.executed_steps) >= 8
    assert len(soak_result.record.sessions) >= 2
    assert soak_result.verdict is not None
    assert soak_result.verdict.decisions > 20
    assert soak_result.probes > 0
    assert {growth.name for growth in soak_result.growths} == {
        "server", "scheduler", "detokenizer", "agent", "sidecar", "redis",
    }  # fmt: skip
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["is_sound"] is True
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
