"""What both servers say of themselves is read alike, and what is strange is taken cautiously."""

import pytest

from controller.profiling.engine_http import (
    SGLANG,
    VLLM,
    EngineLimits,
    load_body,
    sglang_limits,
    vllm_limits,
)
from controller.profiling.errors import EngineUnreachableError

MODELS = {"data": [{"id": "m", "max_model_len": 1024}]}


def metrics(labels: str) -> str:
    return f"# HELP vllm:cache_config_info x\nvllm:cache_config_info{{{labels}}} 1.0\n"


@pytest.mark.parametrize(
    ("labels", "pool"),
    [
        ('block_size="128",kv_cache_size_tokens="37376",num_gpu_blocks="292"', 37376),
        ('block_size="16",num_gpu_blocks="100"', 1600),
        ('block_size="16",num_gpu_blocks="None"', 1024),
        ('mamba_block_size="64",num_gpu_blocks="100"', 1024),
        ("", 1024),
    ],
)
def test_vllms_pool_is_what_its_metrics_say(labels, pool):
    assert vllm_limits(MODELS, metrics(labels)) == EngineLimits(1024, pool)


@pytest.mark.parametrize("models", [None, {}, {"data": []}, {"data": ["m"]}, "text"])
def test_a_server_without_a_model_is_refused(models):
    with pytest.raises(EngineUnreachableError, match="names no model"):
        vllm_limits(models, "")


def test_a_length_that_is_not_said_is_taken_cautiously():
    assert vllm_limits({"data": [{"max_model_len": None}]}, "") == EngineLimits(2048, 2048)
    assert sglang_limits({"max_total_num_tokens": 9}) == EngineLimits(2048, 9)


def test_a_load_is_greedy_and_ends_by_its_length_alone():
    ids = ["a", "b"]
    vllm = load_body(VLLM, [[1, 2], [3]], ids, 8)
    assert (vllm["prompt"], vllm["max_tokens"], vllm["ignore_eos"]) == ([[1, 2], [3]], 8, True)
    sglang = load_body(SGLANG, [[1, 2], [3]], ids, 8)
    assert (sglang["input_ids"], sglang["rid"]) == ([[1, 2], [3]], ids)
    assert sglang["sampling_params"]["max_new_tokens"] == 8
    assert vllm["temperature"] == sglang["sampling_params"]["temperature"] == 0
