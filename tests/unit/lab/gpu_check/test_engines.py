from dataclasses import replace
from pathlib import Path

import pytest

from lab.gpu_check import engines
from lab.gpu_check.engines import (
    ADAPTIVE,
    OFF,
    PINNED,
    PINNED_NO_OVERLAP,
    SHAPE_ENGINES,
    STATIC,
    STATIC_NO_OVERLAP,
    STEERED,
    EngineSetting,
    command,
    environment,
    graphs_expected,
    speculation_flags,
)
from lab.gpu_check.shapes import QWEN3_8B, Device


@pytest.fixture
def setting(tmp_path: Path) -> EngineSetting:
    return EngineSetting(
        QWEN3_8B, QWEN3_8B.write(tmp_path), Device.GPU, (1, 8, 128), True, ("--log-requests",)
    )


def option(parts: list[str], name: str) -> str:
    return parts[parts.index(name) + 1]


def test_the_engines_differ_in_speculation_and_in_memory_alone(setting: EngineSetting):
    def without_memory(policy: str) -> list[str]:
        parts = command(policy, setting, 1)
        index = parts.index("--mem-fraction-static")
        return parts[:index] + parts[index + 2 :]

    plain = without_memory(OFF)
    assert not [part for part in plain if "speculative" in part]
    for policy in (STATIC, PINNED, ADAPTIVE, STEERED):
        flags = speculation_flags(policy, setting)
        assert sorted(without_memory(policy)) == sorted([*plain, *flags])
    assert plain[-1] == "--log-requests"


def test_engines_that_are_compared_have_equal_pools_and_graphs(setting: EngineSetting):
    commands = [command(policy, setting, 1) for policy in SHAPE_ENGINES]
    assert {option(parts, "--max-total-tokens") for parts in commands} == {
        str(QWEN3_8B.pair_pool_tokens)
    }
    for parts in commands:
        index = parts.index("--cuda-graph-bs-decode")
        assert parts[index + 1 : index + 4] == ["1", "8", "128"]


def test_two_engines_fit_the_memory_of_one_gpu(setting: EngineSetting):
    """The second one's share is of what the first one has left."""
    first, second = (
        float(option(command(policy, setting, 1), "--mem-fraction-static"))
        for policy in (STEERED, OFF)
    )
    gibibytes = 78.0
    weights, kv_bytes_a_token = 16.4, 36 * 2 * 8 * 128 * 2
    pool = QWEN3_8B.pair_pool_tokens * kv_bytes_a_token / 2**30
    left = gibibytes * (1 - first)
    assert gibibytes * first > weights + 3 + 1.2 * pool  # both drafters, and their caches
    assert left * second > weights + pool
    assert left * (1 - second) > 4


def test_an_engine_that_is_alone_has_the_larger_pool(setting: EngineSetting):
    alone = replace(setting, in_pairs=False)
    assert option(command(STEERED, alone, 1), "--max-total-tokens") == str(QWEN3_8B.pool_tokens)


def test_the_plugin_is_all_that_distinguishes_the_pinned_engine(setting: EngineSetting):
    assert command(STATIC, setting, 1) == command(PINNED, setting, 1)
    assert command(STATIC_NO_OVERLAP, setting, 1) == command(PINNED_NO_OVERLAP, setting, 1)
    assert environment(STATIC, setting, "unix:/s") == environment(OFF, setting, "unix:/s") == {}
    pinned = environment(PINNED, setting, "unix:/s")
    assert pinned["SPECULATION_SIDECAR"] == "unix:/s"
    assert "SPECULATION_DFLASH_MODEL_PATH" not in pinned


def test_the_steered_engine_has_both_drafters(setting: EngineSetting):
    steered = environment(STEERED, setting, "unix:/s")
    assert steered["SPECULATION_DFLASH_MODEL_PATH"] == str(setting.models.dflash)
    assert steered["SPECULATION_GAMMAS"].startswith("0,1,2")


def test_draft_lengths_with_a_limit_have_fewer_graphs():
    whole = engines.count_captures(STEERED, QWEN3_8B, (1, 8, 128))
    limited = engines.count_captures(STEERED, replace(QWEN3_8B, graph_limits="15:8"), (1, 8, 128))
    assert whole - limited == 3  # verification, further drafts, reading


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ((), Device.GPU, True),
        ((), Device.EMULATED, True),
        (("--disable-cuda-graph",), Device.GPU, False),
        ((), Device.CPU, False),
    ],
)
def test_graphs_are_expected_where_there_can_be_any(options, device, expected):
    assert graphs_expected(options, device) is expected
