"""docs/engines.md states the supported versions, as the plugins have them, and only it does."""

import re
from pathlib import Path

import pytest

from engine_shim.sglang.api import versions
from engine_shim.vllm import vllm_api

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
SUPPORTED = PAGE.partition("\n## Which versions are supported?\n")[2].partition("\n### ")[0]
# A range of versions, as in "SGLang 0.5.21 to 0.5.23", states support.
RANGE = re.compile(r"(?:SGLang|vLLM) \d+\.\d+(?:\.\d+)? to \d+\.\d+")
# Where a range says in which versions something behaves in some way.
FACTS = {"engines.md", "losslessness.md"}


def versions_of(engine: str) -> list[tuple[str, ...]]:
    """The versions in each cell of the engine's row."""
    (row,) = re.findall(rf"^\| {engine} \| (.*) \|$", SUPPORTED, re.MULTILINE)
    return [tuple(sorted(re.findall(r"\d+(?:\.\d+)+", cell))) for cell in row.split("|")]


def test_the_tested_versions_of_sglang_are_those_of_the_plugin() -> None:
    tested, warned, refused = versions_of("SGLang")
    assert (tested, warned, refused) == (tuple(sorted(versions.TESTED)), (), ())


def test_the_versions_of_vllm_are_those_of_the_plugin() -> None:
    tested, warned, _ = versions_of("vLLM")
    assert tested == tuple(sorted(vllm_api.TESTED))
    assert warned == tuple(sorted(version.removesuffix(".0") for version in vllm_api.COMPATIBLE))


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_no_other_document_states_them(page: Path) -> None:
    if page.name not in FACTS:
        assert not RANGE.search(" ".join(page.read_text(encoding="utf-8").split()))
