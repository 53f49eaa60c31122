"""Tests what a run prints when it is told to stop."""

from pathlib import Path

import pytest

from lab.harness.terminal import Terminal


@pytest.mark.parametrize("written", [True, False])
def test_a_run_that_is_told_to_end_names_its_page_if_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: bool
):
    page = tmp_path / "page.md"
    if written:
        page.write_text("| exact | unfinished |")
    Terminal().say_stopped(page)
    printed = capsys.readouterr().out
    assert printed.startswith("\nStopped.")
    assert (str(page) in printed) is written
