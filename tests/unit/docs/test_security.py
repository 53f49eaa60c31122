"""Every promise of docs/security.md has a mechanism, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The cells of the table of promises, without its head."""
    section = PAGE.split("\n## Which test holds each promise?\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """The names of the tests in a file, those of classes among them."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in nodes if isinstance(node, functions) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:50])
def test_a_promise_has_a_mechanism_and_tests_that_exist(row: list[str]) -> None:
    promise, mechanism, tests = row
    assert promise.endswith(".")
    assert mechanism.endswith(".")
    test_references = TEST.findall(tests)
    assert test_references
    # Nothing else stands between backticks there.
    assert len(test_references) == tests.count("`") / 2
    for file, name in test_references:
        assert name in names_of_tests(file), f"{file}::{name}"


def test_every_module_of_attacks_holds_a_promise() -> None:
    attacks = {path.relative_to(ROOT) for path in (ROOT / "tests/system/abuse").glob("test_*.py")}
    named = {Path(file) for *_, tests in rows() for file, _ in TEST.findall(tests)}
    assert attacks
    assert attacks <= named
