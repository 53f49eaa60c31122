"""`python -m lab.papers`."""

import re

import pytest
from typer.testing import CliRunner

from lab.papers.__main__ import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("what", ["tide", "drafters"])
def test_published_results_are_reproduced(what):
    done = run(what)
    assert done.exit_code == 0, done.output


def test_the_figures_of_mixed_pools_come_out():
    done = run("pools")
    rows = re.findall(r"train +(\d\.\d\d) +(\d\.\d{3}) +(\d\.\d\d)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4
    for _, here, paper in rows:
        assert float(here) == pytest.approx(float(paper), abs=0.0105)
