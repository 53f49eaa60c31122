"""The soak with many engines, in short: CROWD_MINUTES, 0.6 unless it says otherwise."""

import os

import pytest

from tests.system.soak.crowd import soak

MINUTES = float(os.environ.get("CROWD_MINUTES", "0.6"))
ENGINES = int(os.environ.get("CROWD_ENGINES", "60"))

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300 + round(120 * MINUTES))]


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    found = soak(ENGINES, MINUTES)
    assert found.findings == []
    # It was a crowd at all.
    assert found.lives >= ENGINES
    assert found.plans > found.lives
    assert found.overrides > 3
    assert found.looks > 3
    assert {growth.kind for growth in found.growths} == {
        "memory", "descriptors", "threads", "sockets", "log",
    }  # fmt: skip
