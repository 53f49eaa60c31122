"""`make upstream` prints what has moved in an engine, and nothing of what has not."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_shim.sglang.api.versions import TESTED, sglang_version
from engine_shim.vllm import vllm_api
from scripts.upstream import sglang_changes, vllm_changes
from tests.support.installed_wheel import Wheel
from tests.unit.engine_shim.vllm import contracts


@pytest.mark.skipif(sglang_version() != TESTED[-1], reason="another SGLang is installed")
def test_nothing_has_moved_in_the_newest_version_that_is_tested():
    assert list(sglang_changes(Wheel(TESTED[-1]))) == []


def test_everything_has_moved_in_a_version_that_has_nothing(tmp_path: Path):
    (tmp_path / "vllm" / "v1").mkdir(parents=True)
    moved_lines = list(vllm_changes(Wheel("another", tmp_path)))
    for target in (*vllm_api.SIGNATURES, *contracts.FIELDS):
        assert any(target in line for line in moved_lines), target
    assert any("has no" in line for line in sglang_changes(Wheel("another", tmp_path)))


def test_a_function_that_takes_something_else_is_named(tmp_path: Path):
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    place = "sglang/srt/speculative/eagle_worker_v2.py"
    source = (Path(spec.origin).parents[1] / place).read_text()
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(
        source.replace("def apply_runtime_state(self, state", "def apply_runtime_state(self, other")
    )
    moved_lines = [
        line for line in sglang_changes(Wheel("another", tmp_path)) if "takes (self, other)" in line
    ]
    assert len(moved_lines) == 1
    assert "apply_runtime_state" in moved_lines[0]
