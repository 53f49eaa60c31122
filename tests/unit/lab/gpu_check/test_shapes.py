import json

import pytest

from engine_shim.sglang.api.settings import load_settings
from lab.gpu_check.shapes import QWEN3_8B, SHAPES, Shape


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafters_read_layers_that_the_target_has(shape: Shape, tmp_path):
    folders = shape.write(tmp_path)
    target, eagle3, dflash = (
        json.loads((folder / "config.json").read_text())
        for folder in (folders.target, folders.eagle3, folders.dflash)
    )
    assert max(dflash["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]
    assert (
        max(eagle3["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        < target["num_hidden_layers"]
    )
    assert {config["hidden_size"] for config in (target, eagle3, dflash)} == {
        shape.target["hidden_size"]
    }


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_is_room_for_a_whole_block_and_for_every_request(shape: Shape):
    assert max(shape.gammas) >= shape.dflash["block_size"] - 1
    for load in shape.loads:
        assert load.prompt_tokens + load.new_tokens < shape.context_length
        assert load.concurrency <= shape.max_batch
    assert shape.static_gamma in shape.gammas


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_plugin_takes_its_settings(shape: Shape, monkeypatch):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/x")
    monkeypatch.setenv("SPECULATION_GAMMAS", ",".join(map(str, shape.gammas)))
    monkeypatch.setenv("SPECULATION_GRAPH_LIMITS", shape.graph_limits)
    assert load_settings().gammas == shape.gammas


def test_dflash_drafts_at_most_its_block_and_gamma_0_is_there_once():
    arms = QWEN3_8B.arms()
    assert [arm for arm in arms if not arm[1]] == [("eagle3", 0)]
    assert ("dflash", 15) in arms
    assert len(arms) == len(set(arms)) == 19
