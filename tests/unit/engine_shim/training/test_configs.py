"""Which drafters' configs have a student: SpecForge's EAGLE3 family, and single fields.

`specforge_configs.json` has the fields of SpecForge's configs that say something about sizes or
about what is computed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig

from engine_shim.training.configs import (
    UnsupportedDrafterError,
    decoder_shape,
    dflash_shape,
    eagle3_shape,
)
from engine_shim.training.eagle3 import Eagle3Shape
from tests.support.live_drafters import config_of
from tests.support.training_rounds import SHAPE

FILE = Path(__file__).with_name("specforge_configs.json")
CONFIGS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["configs"]
REFUSED = {
    "deepseek-v2-lite-eagle3": r"its rotary positions are scaled \(yarn\)",
    "qwen2-5-vl-7b-eagle3": r"its rotary positions are scaled \(mrope\)",
    "qwen2.5-vl-32b-eagle3": r"its rotary positions are scaled \(mrope\)",
    "llama3-70B-ealge3": r"its rotary positions are scaled \(llama3\)",
    "qwen3-8b-peagle": "it is a PEagleDraftModel, not a LlamaForCausalLMEagle3",
}

# 28 heads over 5,120 numbers: transformers does not load it, so no SGLang has it.
UNLOADABLE = "qwen2.5-vl-32b-eagle3"


def as_sglang_has_it(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a published config."""
    fields = json.loads(json.dumps(config))
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    found: dict[str, Any] = made.to_dict()
    return found


def test_all_of_the_family_are_here() -> None:
    assert len(CONFIGS) == 28
    assert CONFIGS.keys() >= REFUSED.keys()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_published_config_is_accepted_or_refused_with_a_reason(name: str) -> None:
    config = CONFIGS[name]
    if name == UNLOADABLE:
        with pytest.raises(StrictDataclassClassValidationError, match="not a multiple"):
            as_sglang_has_it(config)
        live = config
    else:
        live = as_sglang_has_it(config)
    if name in REFUSED:
        for found in (config, live):
            with pytest.raises(UnsupportedDrafterError, match=REFUSED[name]):
                eagle3_shape(found)
        return
    shape = eagle3_shape(config)
    # What is read from a folder is what is read from the engine.
    assert eagle3_shape(live) == shape
    assert shape.decoder.vocabulary == config["vocab_size"]
    assert shape.drafts == config["draft_vocab_size"]
    assert (shape.draft_vocabulary is None) == (shape.drafts == config["vocab_size"])
    assert shape.own_head
    named = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
    assert shape.feature_layers == tuple(named)
    assert shape.features == 3
    assert shape.fc_norm == shape.norm_output == (name == "qwen3-30B-A3B-eagle3.1")
    heads = config["num_attention_heads"]
    assert shape.decoder.head_dim == config.get("head_dim", config["hidden_size"] // heads)
    assert shape.decoder.rope_base == config.get("rope_theta", 10_000)


def test_most_of_them_have_a_small_vocabulary_and_name_no_layers() -> None:
    shapes = [eagle3_shape(config) for name, config in CONFIGS.items() if name not in REFUSED]
    assert sum(shape.draft_vocabulary is not None for shape in shapes) == 22
    assert sum(not shape.feature_layers for shape in shapes) == 19


def config(**changes: Any) -> dict[str, Any]:
    return config_of(SHAPE, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2}, "one layer, not 2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]}}, "ascending"),
        ({"num_aux_hidden_states": 4}, "reads 4 hidden states, and 3 target layers are captured"),
        ({"target_hidden_size": 64}, "hidden states of 64 numbers, and its own have 32"),
        ({"attention_bias": True}, "biases"),
        ({"bias": True}, "biases"),
        ({"tie_word_embeddings": True, "draft_vocab_size": 30}, "drafts 30 of 40 tokens with the"),
        ({"draft_vocab_size": 41}, "no part of the target's 40"),
        ({"model_type": "llama4_text"}, "Llama 4"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"partial_rotary_factor": 0.5}, "rotates 0.5 of a head"),
        ({"rope_is_neox_style": False}, "pairs of neighbours"),
        ({"hidden_size": None}, "its config has no hidden_size"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"scaled \(linear\)"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"scaled \(dynamic\)"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            r"scaled \(longrope\)",
        ),
        # As SGLang leaves it.
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            r"scaled \(mrope\)",
        ),
        ({"rope_scaling": {"factor": 2.0}}, r"scaled \(factor of an unknown type\)"),
        ({"rope_scaling": {"rope_type": "default", "use_fope": True}}, "use_fope of an unknown"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention of an"),
        ({"rope_scaling": {"rope_type": "spiral"}}, r"scaled \(spiral\)"),
    ],
)
def test_a_field_that_a_student_does_not_follow_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedDrafterError, match=reason):
        eagle3_shape(config(**changes))


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_type": "default", "rope_theta": 5e4},
        {"type": "default", "rope_theta": 5e4},
        {"rope_theta": 5e4, "partial_rotary_factor": 1.0},
        # SGLang adds it to a Phi-3's, where it says nothing.
        {"rope_type": "default", "rope_theta": 5e4, "original_max_position_embeddings": 4096},
    ],
)
def test_positions_without_scaling_are_accepted(rotary: dict[str, Any]) -> None:
    assert decoder_shape(config(rope_parameters=rotary)).rope_base == 5e4


def test_defaults_are_those_of_sglang() -> None:
    whole = config()
    for name in ("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps"):
        del whole[name]
    shape = decoder_shape(whole)
    assert (shape.head_dim, shape.kv_heads) == (SHAPE.hidden // SHAPE.heads, SHAPE.heads)
    assert (shape.rope_base, shape.norm_epsilon) == (10_000.0, 1e-6)


def test_heads_and_norms_are_read() -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    decoder = decoder_shape(config())
    assert eagle3_shape(config(draft_vocab_size=None)) == Eagle3Shape(decoder, (), own_head=False)
    assert not eagle3_shape(config(tie_word_embeddings=True)).own_head
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        found = eagle3_shape(config(eagle_config=layers, **{name: True}))
        assert found == Eagle3Shape(decoder, (0, 1), **{name: True})
    nested = eagle3_shape(config(eagle_config=layers | {"norm_before_fc": True}))
    assert nested.norm_before_fc
    assert eagle3_shape(config(use_aux_norm=True)).fc_norm


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "do not see the whole context"),
        ({"is_causal": True}, "its blocks are causal"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"scaled \(yarn\)"),
    ],
)
def test_a_block_drafter_that_a_student_does_not_follow_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedDrafterError, match=reason):
        dflash_shape(config(**changes), 2, 8, 0)
    assert dflash_shape(config(num_hidden_layers=5), 2, 8, 0).decoder.layers == 5
