from pathlib import Path

import pytest

from lab.gpu_check.engines import (
    OFF,
    PINNED,
    STATIC,
    STEERED,
    EngineSetting,
    command,
    environment,
    graphs_expected,
    speculation_flags,
)
from lab.gpu_check.shapes import QWEN3_8B


@pytest.fixture
def setting(tmp_path: Path) -> EngineSetting:
    return EngineSetting(
        QWEN3_8B, QWEN3_8B.write(tmp_path), on_cpu=False, options=("--log-requests",)
    )


def test_the_engines_differ_in_speculation_and_in_memory_alone(setting):
    def without_memory(policy: str) -> list[str]:
        parts = command(policy, setting, 1)
        at = parts.index("--mem-fraction-static")
        return parts[:at] + parts[at + 2 :]

    plain = without_memory(OFF)
    assert not [part for part in plain if "speculative" in part]
    for policy in (STATIC, PINNED, STEERED):
        flags = speculation_flags(policy, setting)
        assert sorted(without_memory(policy)) == sorted([*plain, *flags])
    assert plain[-1] == "--log-requests"


def test_the_plugin_is_all_that_distinguishes_the_pinned_engine(setting):
    assert command(STATIC, setting, 1) == command(PINNED, setting, 1)
    assert environment(STATIC, setting, "unix:/s") == environment(OFF, setting, "unix:/s") == {}
    pinned = environment(PINNED, setting, "unix:/s")
    assert pinned["SPECULATION_SIDECAR"] == "unix:/s"
    assert "SPECULATION_DFLASH_MODEL_PATH" not in pinned


def test_the_steered_engine_has_both_drafters(setting):
    steered = environment(STEERED, setting, "unix:/s")
    assert steered["SPECULATION_DFLASH_MODEL_PATH"] == str(setting.models.dflash)
    assert steered["SPECULATION_GAMMAS"].startswith("0,1,2")


@pytest.mark.parametrize(
    ("options", "on_cpu", "expected"),
    [((), False, True), (("--disable-cuda-graph",), False, False), ((), True, False)],
)
def test_graphs_are_expected_where_there_can_be_any(options, on_cpu, expected):
    assert graphs_expected(options, on_cpu=on_cpu) is expected
