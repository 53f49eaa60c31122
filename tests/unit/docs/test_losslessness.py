"""Every row of the matrix in docs/losslessness.md has a test that exists, or a reason."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.engine import MODES

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "losslessness.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^`]+)\])?`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


CLAIMED, OTHERS = rows("What is claimed"), rows("What is not claimed")


def names_of_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", CLAIMED, ids=lambda row: row[0][:40])
def test_what_is_claimed_has_tests_that_are_there(row: list[str]) -> None:
    _, tests, ways = row
    test_references = TEST.findall(tests)
    assert test_references
    assert len(test_references) == tests.count("`") / 2
    for file, name, _ in test_references:
        assert name in names_of_tests(file), name
    assert ways
    assert set(ways.split(", ")) <= set(MODES)


def test_kinds_of_requests_are_those_that_are_asked() -> None:
    kinds = {kind for row in CLAIMED for *_, kind in TEST.findall(row[1]) if kind}
    asked = (ROOT / "tests" / "support" / "request_kinds.py").read_text(encoding="utf-8")
    assert kinds
    for kind in kinds:
        assert f'"{kind.removeprefix("1-")}": ' in asked, kind


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[0][:40])
def test_what_is_not_claimed_has_a_reason(row: list[str]) -> None:
    condition, happens, reason = row
    assert condition
    assert happens
    assert reason.endswith(".")


def test_the_claims_of_other_documents_point_here() -> None:
    for page in ("README.md", "docs/engines.md"):
        assert "losslessness.md" in (ROOT / page).read_text(encoding="utf-8")
