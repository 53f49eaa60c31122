"""The simulator's commands where it is not installed, and another package has its name."""

import subprocess
import sys
from pathlib import Path

import pytest

from controller.util.exit_codes import Exit
from tests.support.service_harness import ENVIRONMENT

ADVICE = "pip install speculation-controller-simulator"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with a package `simulator` that has no commands."""
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "__init__.py").touch()
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `controller` where modules of that folder come first."""
    return subprocess.run(
        [sys.executable, "-m", "controller.cli", *words],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("line", ["simulate --suite standard", "convert a b --force", "advise"])
def test_a_command_says_in_one_line_how_to_install_it(foreign: Path, line: str):
    done = run(foreign, *line.split())
    name = line.split(maxsplit=1)[0]
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr == f"controller {name}: the simulator is not installed: {ADVICE}\n"


def test_the_commands_are_listed_all_the_same(foreign: Path):
    listed = run(foreign, "--help").stdout
    assert {"simulate", "convert", "advise", "serve"} <= set(listed.split())
    assert ADVICE in " ".join(run(foreign, "simulate", "--help").stdout.split())


def test_a_module_that_the_simulator_lacks_is_no_missing_simulator(foreign: Path):
    (foreign / "simulator" / "commands.py").write_text("import nosuch\n")
    done = run(foreign, "version")
    assert done.returncode == Exit.FAILED
    assert "No module named 'nosuch'" in done.stderr
