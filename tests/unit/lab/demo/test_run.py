import sys
from pathlib import Path

import psutil
import pytest
import typer

from lab.demo import __main__ as command_line
from lab.demo import engines
from lab.demo.run import DemoOptions, run
from lab.demo.stream import QUICK, SEED, build_stream
from lab.harness.errors import EngineFailedError
from lab.harness.terminal import Terminal


def options(output: Path) -> DemoOptions:
    return DemoOptions(build_stream(QUICK, SEED), 1, 2, 15.0, output)


@pytest.fixture
def broken_engines(monkeypatch):
    code = "import time; time.sleep(0.5); raise SystemExit('no such model')"
    monkeypatch.setattr(
        engines, "engine_command", lambda policy, port: [sys.executable, "-c", code]
    )


@pytest.mark.usefixtures("broken_engines")
def test_an_engine_that_does_not_come_up_ends_the_demo_with_its_log_and_leaves_nothing(tmp_path):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineFailedError, match=r"engine steered(?s:.*)no such model"):
        run(options(tmp_path), Terminal())
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
    assert (tmp_path / "logs" / "steered.log").read_text() == "no such model\n"
    assert (tmp_path / "logs" / "sidecar.log").exists()
    assert not (tmp_path / "result.json").exists()


@pytest.mark.usefixtures("broken_engines")
def test_the_command_then_says_why_and_exits_with_an_error(tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        command_line.demo(
            quick=True,
            repeats=None,
            static_gamma=None,
            output=tmp_path,
            seed=SEED,
        )
    assert ended.value.exit_code == command_line.EXIT_FAILED
    printed = capsys.readouterr().out
    assert "The demo failed: engine steered ended with status 1" in printed
    assert "no such model" in printed
