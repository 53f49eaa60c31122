import os
import sys
from pathlib import Path

import pytest
import typer

from lab.demo import __main__ as command_line
from lab.demo.__main__ import StreamName
from lab.demo.run import DemoOptions, run
from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.terminal import EXIT_FAILED, Terminal
from lab.paced import engines
from lab.paced.traffic import UNSEEN_DAY, UNSEEN_SEED, build_stream
from tests.support.left_behind import find_children


def options(output: Path, table: str = "h100-llama3.1-8b") -> DemoOptions:
    stream = build_stream("unseen", UNSEEN_DAY, UNSEEN_SEED)
    return DemoOptions(table, (stream,), 4.0, 15.0, output)


@pytest.fixture
def broken_engines(monkeypatch):
    code = "import time; time.sleep(0.5); raise SystemExit('no such model')"
    monkeypatch.setattr(
        engines, "command", lambda policy, setting, port: [sys.executable, "-c", code]
    )


@pytest.mark.usefixtures("broken_engines")
def test_an_engine_that_does_not_come_up_ends_the_demo_with_its_log_and_leaves_nothing(tmp_path):
    before, priority = find_children(), os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(EngineFailedError, match=r"engine off(?s:.*)no such model"):
        run(options(tmp_path), Terminal())
    assert find_children() <= before
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority
    assert (tmp_path / "logs" / "off.log").read_text() == "no such model\n"
    assert not (tmp_path / "result.json").exists()


@pytest.mark.usefixtures("broken_engines")
def test_the_command_then_says_why_and_exits_with_an_error(tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        command_line.demo(stream=StreamName.UNSEEN, output=tmp_path)
    assert ended.value.exit_code == EXIT_FAILED
    printed = capsys.readouterr().out
    assert "The demo failed: engine off ended with status 1" in printed
    assert "no such model" in printed


def test_a_table_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(HarnessError, match=r"--pace no-such-table.*neither a file nor one of"):
        run(options(tmp_path, "no-such-table"), Terminal())
