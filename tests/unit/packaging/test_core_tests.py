"""The tests of `make test-core` need no engine and no program that pip does not install."""

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.packaging.environments import ROOT

LIST = ROOT / "tests" / "core_tests.txt"
ENGINES = {"safetensors", "sglang", "tokenizers", "torch", "transformers", "vllm"}
# Modules of tests that start programs of Debian packages.
PROGRAMS = {"prometheus_server", "redis_fleet", "redis_server"}
BLOCK = """\
import sys

sys.modules.update(dict.fromkeys({engines!r}))
"""


def arguments() -> list[str]:
    return LIST.read_text().splitlines()


def chosen() -> list[Path]:
    left_out = {ROOT / a.removeprefix("--ignore=") for a in arguments() if a.startswith("--ignore")}
    paths = [ROOT / a for a in arguments() if not a.startswith("-")]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return [file for file in files if file not in left_out]


def imported(file: Path) -> Iterator[str]:
    """The full name of whatever a file imports, in functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def collected(folder: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    """Collects tests where no engine can be imported."""
    (folder / "no_engine.py").write_text(BLOCK.format(engines=sorted(ENGINES)))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no_engine", "-p", "no:cacheprovider",
         "--collect-only", "-q", *paths],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_path_on_the_list_is_there():
    paths = [argument.removeprefix("--ignore=") for argument in arguments()]
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_no_chosen_file_imports_an_engine_or_starts_a_program():
    for file in chosen():
        for name in imported(file):
            parts = name.split(".")
            assert parts[0] not in ENGINES, f"{file.relative_to(ROOT)}: {name}"
            assert not PROGRAMS.intersection(parts), f"{file.relative_to(ROOT)}: {name}"


def test_the_chosen_tests_are_collected_where_no_engine_is_installed(tmp_path: Path):
    done = collected(tmp_path, f"@{LIST.relative_to(ROOT)}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_test_that_imports_an_engine_is_found(tmp_path: Path):
    test = tmp_path / "test_engine.py"
    test.write_text("import torch\n\n\ndef test_it():\n    assert torch\n")
    done = collected(tmp_path, str(test))
    assert done.returncode != 0
    assert "torch" in done.stdout


@pytest.mark.parametrize("target", ["test-core", "setup-core"])
def test_the_targets_use_an_environment_and_a_list_of_their_own(target: str):
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", target],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shlex.split(done.stdout)
    assert "scripts/setup_core.sh" in words
    assert "scripts/setup.sh" not in words
    assert target == "setup-core" or "@tests/core_tests.txt" in words
