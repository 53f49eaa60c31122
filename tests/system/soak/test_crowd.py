"""The soak with many engines, in short: CROWD_MINUTES, 0.6 unless it says otherwise.

So short a run finds tasks, descriptors, threads and sockets that are left behind.  Memory is judged
in runs of five minutes or more: before that, the histories of engines fill.
"""

import os

import pytest

from tools.soak.crowd import soak

MINUTES = float(os.environ.get("CROWD_MINUTES", "0.6"))
MEMORY_MINUTES = 5.0
ENGINES = int(os.environ.get("CROWD_ENGINES", "60"))

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300 + round(120 * MINUTES))]


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    soak_result = soak(ENGINES, MINUTES)
    fills = MINUTES < MEMORY_MINUTES
    assert [
        it for it in soak_result.findings if not (fills and ": memory_megabytes grew" in it)
    ] == []
    # It was a crowd at all.
    assert soak_result.lives >= ENGINES
    assert soak_result.plans > soak_result.lives
    assert soak_result.overrides > 3
    assert soak_result.probes > 3
    assert {growth.kind for growth in soak_result.growths} == {
        "memory_megabytes", "descriptors", "threads", "sockets", "log_bytes",
    }  # fmt: skip
