import json
from dataclasses import asdict

import pytest

from engine_shim.sglang.api.settings import load_settings
from lab.gpu_check.parts.costs import fits_pool, short_context
from lab.gpu_check.shapes import QWEN3_8B, SHAPES, Shape, UnknownShapeError, load_shape


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
    assert len(arms) == len(set(arms)) == 13


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_pool_of_each_of_two_engines_holds_every_load_and_the_short_table(shape: Shape):
    most = max(load.concurrency * (load.prompt_tokens + load.new_tokens) for load in shape.loads)
    assert most <= shape.pair_pool_tokens <= shape.pool_tokens
    for pool in (shape.pool_tokens, shape.pair_pool_tokens):
        assert fits_pool(shape.max_batch, short_context(shape, pool), pool)
        assert short_context(shape, pool) >= shape.context_tokens / 2


def test_the_long_table_has_more_than_one_batch_size():
    sizes = [
        size
        for size in QWEN3_8B.batch_sizes
        if fits_pool(size, QWEN3_8B.long_context_tokens, QWEN3_8B.pool_tokens)
    ]
    assert sizes == [1, 4, 8]
    assert QWEN3_8B.long_context_tokens >= 8192


def test_a_shape_may_be_a_file(tmp_path):
    folder = tmp_path / "shape.json"
    folder.write_text(json.dumps({**asdict(QWEN3_8B), "name": "mine"}))
    assert load_shape(str(folder)).name == "mine"
    assert load_shape("small").name == "small"


@pytest.mark.parametrize("shape_name", ["nothing", "missing.json", "broken.json"])
def test_a_shape_that_cannot_be_read_is_refused(shape_name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"name": "x"}')
    with pytest.raises(UnknownShapeError, match=shape_name):
        load_shape(shape_name)
