"""What a run does before any engine starts."""

from pathlib import Path

from lab.paced.envelope.run import EnvelopeOptions
from tests.unit.lab.paced.envelope.recorded import point


def test_what_an_earlier_run_has_found_is_not_run_again():
    kept = (point(1), point(8))
    options = EnvelopeOptions((1, 2, 8, 64), 26.0, None, Path("build"), kept)
    assert options.missing == (2, 64)
    assert EnvelopeOptions((2, 1), 26.0, None, Path("build")).missing == (1, 2)
