import subprocess
import sys
import time

import pytest

from lab.harness import measured
from lab.harness.measured import ForeignLoad


@pytest.fixture
def numbers(monkeypatch):
    """(seconds since boot, busy seconds of the machine, seconds of our own), call by call."""

    def set_numbers(*rows: tuple[float, float, float]) -> None:
        for index, name in enumerate(("_uptime", "_busy_seconds", "_own_seconds")):
            values = iter([row[index] for row in rows])
            monkeypatch.setattr(measured, name, lambda values=values: next(values))

    return set_numbers


def test_what_is_not_ours_is_theirs(numbers):
    numbers((100.0, 50.0, 10.0), (110.0, 65.0, 20.0))
    with ForeignLoad() as load:
        pass
    assert load.cores == pytest.approx(0.5)


def test_rounding_never_makes_it_negative(numbers):
    numbers((100.0, 50.0, 10.0), (101.0, 50.9, 11.0))
    with ForeignLoad() as load:
        pass
    assert load.cores == 0.0


_SPIN = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


def test_our_own_children_are_ours_also_after_they_have_ended():
    before = measured._own_seconds()
    subprocess.run([sys.executable, "-c", _SPIN], check=True)
    assert measured._own_seconds() - before >= 0.5


def test_our_own_children_are_ours_while_they_run():
    before = measured._own_seconds()
    spinner = subprocess.Popen([sys.executable, "-c", _SPIN + "\ntime.sleep(30)"])
    try:
        deadline = time.monotonic() + 60
        while measured._own_seconds() - before < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        spinner.kill()
        spinner.wait()
