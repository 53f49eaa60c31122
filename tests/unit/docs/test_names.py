"""scripts/names.py, a part of `make check`, finds forbidden names wherever they are defined."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run_lint(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "scripts/names.py", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("found = 1\n", "1: variable 'found'"),
        ("_said: int = 1\n", "1: variable '_said'"),
        ("def f(at):\n    return at\n", "1: variable 'at'"),
        ("class A:\n    def f(self):\n        self.told = 1\n", "3: variable 'told'"),
        ("for past in ():\n    pass\n", "1: variable 'past'"),
        ("x = [made for made in ()]\n", "1: variable 'made'"),
        ("with open('x') as beside:\n    pass\n", "1: variable 'beside'"),
        ("try:\n    pass\nexcept OSError as why:\n    pass\n", "3: variable 'why'"),
        ("match x:\n    case given:\n        pass\n", "2: variable 'given'"),
        ("def until():\n    pass\n", "1: function 'until'"),
        ("async def why_not_ready():\n    pass\n", "1: function 'why_not_ready'"),
        ("FOUND = 1\n", "1: variable 'FOUND'"),
        ("import x as said\n", "1: variable 'said'"),
        ("match x:\n    case {**told}:\n        pass\n", "2: variable 'told'"),
        ("match x:\n    case [*made]:\n        pass\n", "2: variable 'made'"),
        ("class Began:\n    pass\n", "1: class 'Began'"),
    ],
)
def test_a_forbidden_name_is_found(tmp_path: Path, text: str, finding: str):
    result = run_lint(tmp_path / "module.py", text)
    assert result.returncode == 1, result.stderr
    assert f"module.py:{finding}" in result.stdout
    assert result.stdout.endswith("names: 1 findings\n")


@pytest.mark.parametrize(
    "text",
    [
        "found_profiles = 1\n",
        # Others' names are used, not chosen, here.
        "message.at = 1.0\nprint(found)\n",
        # EngineWarning.found is a field of the contract, which the core's class mirrors.
        "class EngineWarning:\n    found: str\n",
    ],
)
def test_other_names_pass(tmp_path: Path, text: str):
    result = run_lint(tmp_path / "module.py", text)
    assert (result.returncode, result.stdout) == (0, "names: 0 findings\n")


def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path):
    result = run_lint(tmp_path / "module.py", "def f(:\n")
    assert result.returncode == 1
    assert "module.py: cannot be parsed" in result.stdout


def test_the_names_of_this_repository_pass():
    command = [sys.executable, "scripts/names.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "names: 0 findings\n")
