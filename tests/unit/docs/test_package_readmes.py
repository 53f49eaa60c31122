"""scripts/readmes.py, a part of `make check`, finds what package READMEs lack or name wrongly."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TREES = ("controller", "simulator", "engine_shim", "trainer", "lab", "tools")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREES:
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "README.md").write_text("# `first.py`, and `second` in `inner/`\n")
        (tmp_path / name / "first.py").touch()
        (tmp_path / name / "inner" / "second.py").touch()
        (tmp_path / name / "inner" / "__init__.py").touch()
    return tmp_path


def run_lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/readmes.py", "--root", str(root)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_complete_readmes_pass(tree: Path):
    result = run_lint(tree)
    assert (result.returncode, result.stdout) == (0, "package READMEs: 0 findings\n")


def test_a_module_without_a_line_is_found(tree: Path):
    (tree / "tools" / "inner" / "third.py").touch()
    result = run_lint(tree)
    assert result.returncode == 1
    assert "tools/README.md: does not name third.py" in result.stdout


def test_a_package_with_a_readme_is_not_described_above(tree: Path):
    (tree / "lab" / "inner" / "README.md").write_text("# inner\n")
    assert "lab/inner/README.md: does not name second.py" in run_lint(tree).stdout


@pytest.mark.parametrize("name", ["gone.py", "gone/"])
def test_what_does_not_exist_is_found(tree: Path, name: str):
    (tree / "trainer" / "README.md").write_text(f"# `first.py`, `second.py`, `{name}`\n")
    result = run_lint(tree)
    assert result.returncode == 1
    assert f"trainer/README.md: {name} does not exist" in result.stdout


def test_a_tree_without_a_readme_is_found(tree: Path):
    (tree / "controller" / "README.md").unlink()
    assert "controller: there is no README.md" in run_lint(tree).stdout


def test_the_readmes_of_this_repository_are_complete():
    assert run_lint(ROOT).stdout == "package READMEs: 0 findings\n"
