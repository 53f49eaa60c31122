"""What an engine of vLLM says of itself."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import METHODS
from engine_shim.vllm.engine_description import DRAFTER_KINDS, describe_engine, server_id
from engine_shim.vllm.settings import VllmSettings
from speculation.v1 import engine_pb2


def config(method: str = "eagle3", *, is_async: bool = True) -> Any:
    draft = None if method == "ngram" else SimpleNamespace(model="org/draft")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/target", revision="abc", dtype="torch.bfloat16", quantization=None
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=64, async_scheduling=is_async),
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft, revision=None),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="PIECEWISE")),
        device_config=SimpleNamespace(device_type="cpu"),
        use_v2_model_runner=False,
    )


def spec(vllm_config: Any) -> engine_pb2.EngineSpec:
    return describe_engine(vllm_config, VllmSettings.load(), (0, 1, 3))


def test_it_drafts_a_step_before_it_verifies_and_is_warm_without_drafts(monkeypatch):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("SPECULATION_ENGINE_ID", "pod-3")
    engine_spec = spec(config())
    assert (engine_spec.engine_id, engine_spec.max_batch_size) == ("pod-3", 64)
    capabilities = engine_spec.capabilities
    assert (capabilities.draft_lag, capabilities.overlap_steps) == (1, 1)
    assert capabilities.drafters_follow
    assert not capabilities.can_sleep
    assert not capabilities.can_update_online
    assert not capabilities.can_switch_drafter
    (drafter,) = engine_spec.drafters
    assert (drafter.name, drafter.model, list(drafter.gammas)) == ("eagle3", "org/draft", [0, 1, 3])
    mark = engine_spec.fingerprint
    assert (mark.engine, mark.engine_version) == ("vllm", "0.32.0")
    assert (mark.target_model, mark.target_revision) == ("org/target", "abc")
    assert (mark.dtype, mark.tensor_parallel_size) == ("bfloat16", 2)
    assert mark.attention_backend == "auto,piecewise,async"
    assert list(mark.graph_batch_sizes) == []


def test_without_async_scheduling_results_come_at_once_and_costs_are_others():
    engine_spec = spec(config(is_async=False))
    assert engine_spec.capabilities.overlap_steps == 0
    assert engine_spec.fingerprint != spec(config()).fingerprint


def test_the_other_model_runner_has_other_costs():
    vllm_config = config()
    vllm_config.use_v2_model_runner = True
    assert spec(vllm_config).fingerprint.attention_backend == "auto,piecewise,async,runner2"


def test_every_method_has_a_kind_and_a_lookup_has_no_model():
    assert DRAFTER_KINDS.keys() == set(METHODS)
    (drafter,) = spec(config("ngram")).drafters
    assert (drafter.kind, drafter.model) == (engine_pb2.DRAFTER_KIND_NGRAM, "")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["/bin/vllm", "serve", "m", "--port", "8123"], 8123),
        (["/bin/vllm", "serve", "m", "--port=8124"], 8124),
        (["/bin/vllm", "serve", "m"], 8000),
        (["/bin/vllm", "serve", "m", "--port", "8123", "--port", "8125"], 8125),
        (["/bin/vllm", "serve", "m", "--port", "0"], None),
        (["/bin/vllm", "serve", "m", "--uds", "/run/a.sock"], "uds-93d3f03a"),
        (["/bin/vllm", "serve", "m", "--port=8123", "--uds=/run/b.sock"], "uds-95242085"),
        (["/bin/vllm", "serve", "m", "--config", "/nowhere.yaml"], 8000),
        (["/x/vllm/entrypoints/openai/api_server.py", "--model", "m"], 8000),
        (["script.py", "--port"], None),
        (["script.py", "--port", "x"], None),
        ([], None),
    ],
)
def test_the_engine_is_named_by_its_port_or_else_by_its_process(arguments, word):
    assert server_id(arguments) == (word or f"vllm-{os.getpid()}")


def test_the_port_may_be_in_vllms_configuration_file(tmp_path):
    file = tmp_path / "vllm.yaml"
    command = ["/bin/vllm", "serve", "m", "--config", str(file)]
    file.write_text("port: 8126\nmax-num-seqs: 8\n")
    assert server_id(command) == 8126
    assert server_id([*command, "--port", "8127"]) == 8127
    file.write_text("- a list\n")
    assert server_id(command) == 8000
    file.write_text("{")
    assert server_id(command) == 8000
