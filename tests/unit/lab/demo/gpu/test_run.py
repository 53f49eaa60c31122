"""A run that cannot continue leaves a readable result, with the reason, and no process."""

import json
import signal
import sys

import psutil
import pytest
import typer

import lab.harness.orphan_guard
from lab.demo.gpu import __main__ as command_line
from lab.demo.gpu import engines
from lab.demo.gpu.plan import SETTINGS
from lab.demo.gpu.run import BudgetReachedError, GpuDemoOptions, run
from lab.gpu_check.shapes import SMALL, Device
from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.terminal import Terminal


def options(output):
    return GpuDemoOptions(SETTINGS[SMALL.name], 540.0, 5.0, output, device=Device.CPU)


def find_children() -> set[int]:
    """The ids of all descendants of this process, but for the lab's guard.

    The guard starts with the first process that the lab starts here, in whichever test that is, and
    stays until this process ends.
    """
    guard = lab.harness.orphan_guard.__file__
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if guard not in _read_command(child)
    }


def _read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        # It has ended, or ends now: whoever reads it again does not find it.
        return []


@pytest.fixture
def engine_that(monkeypatch):
    def choose(code):
        monkeypatch.setattr(
            engines, "command", lambda policy, setting, port: [sys.executable, "-c", code]
        )

    return choose


def test_an_engine_that_ends_is_the_reason_that_the_page_gives(engine_that, tmp_path):
    engine_that("raise SystemExit('no such model')")
    before = find_children()
    with pytest.raises(EngineFailedError, match=r"engine steered(?s:.*)no such model"):
        run(options(tmp_path), Terminal())
    document = json.loads((tmp_path / "result.json").read_text())
    assert not document["complete"]
    assert "no such model" in document["stopped"]
    assert "runs" not in document
    assert "no such model" in (tmp_path / "page.md").read_text()
    assert find_children() <= before


def test_when_the_time_is_over_the_run_ends_and_says_so(engine_that, tmp_path):
    engine_that("import time; time.sleep(600)")
    before = find_children()
    previous = signal.signal(signal.SIGALRM, command_line.end_of_time)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with pytest.raises(BudgetReachedError) as ended:
            run(options(tmp_path), Terminal())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert ended.value.code == command_line.EXIT_CUT_OFF
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["stopped"] == "the 540 seconds were over"
    assert find_children() <= before


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(HarnessError, match="nothing can be written to"):
        run(options(occupied), Terminal())


def test_a_result_says_that_it_is_incomplete_from_the_beginning(tmp_path, monkeypatch):
    """So that a killed run differs from one that came to its end."""
    seen = []

    def look(_):
        seen.append(json.loads((tmp_path / "result.json").read_text()))
        raise OSError("the disk is full")

    monkeypatch.setattr("lab.demo.gpu.run._Day.run", look)
    with pytest.raises(OSError, match="full"):
        run(options(tmp_path), Terminal())
    assert seen[0]["complete"] is False
    assert "has not ended yet" in seen[0]["stopped"]
    assert "the disk is full" in json.loads((tmp_path / "result.json").read_text())["stopped"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"shape": "none"}, "qwen3-8b, small"), ({"minutes": 1.0, "cpu": True}, "too few")],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    arguments, message, tmp_path, capsys
):
    with pytest.raises(typer.Exit) as ended:
        command_line.demo(output=tmp_path, **arguments)
    assert ended.value.exit_code == command_line.EXIT_USAGE
    assert message in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []
