"""Which drafters' configs have a student: SpecForge's EAGLE3 family, and single fields.

`specforge_configs.json` has the fields of SpecForge's configs that say something about sizes or
about what is computed.
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig

from engine_shim.sglang.api.versions import sglang_version
from engine_shim.sglang.training.chain import Eagle3Shape
from engine_shim.sglang.training.dflash import DFlashShape
from engine_shim.sglang.training.drafter_config import (
    DFLASH_FIELDS,
    EAGLE3_FIELDS,
    EAGLE_LAYERS,
    INERT_FIELDS,
    MTP_FIELDS,
    unknown_fields,
)
from engine_shim.sglang.training.students import (
    UnsupportedDrafterError,
    decoder_shape,
    dflash_shape,
    eagle3_shape,
    mtp_shape,
)
from tests.support.installed_wheel import Wheel
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
    sglang_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config_fields: dict[str, Any] = sglang_config.to_dict()
    return config_fields


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
        for config_form in (config, live):
            with pytest.raises(UnsupportedDrafterError, match=REFUSED[name]):
                eagle3_shape(config_form)
        return
    shape = eagle3_shape(config)
    # What is read from a folder is what is read from the engine.
    assert eagle3_shape(live) == shape
    assert shape.decoder.vocabulary == config["vocab_size"]
    assert shape.draft_vocabulary_size == config["draft_vocab_size"]
    assert (shape.draft_vocabulary is None) == (shape.draft_vocabulary_size == config["vocab_size"])
    assert shape.own_head
    named = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
    assert shape.feature_layers == tuple(named)
    assert shape.feature_count == 3
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
        ({"draft_vocab_size": 41}, r"must be in \[1, 40\]"),
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
        # SGLang adds it to a Phi-3's, where it has no effect.
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
        drafter_shape = eagle3_shape(config(eagle_config=layers, **{name: True}))
        assert drafter_shape == Eagle3Shape(decoder, (0, 1), **{name: True})
    nested = eagle3_shape(config(eagle_config=layers | {"norm_before_fc": True}))
    assert nested.norm_before_fc
    assert eagle3_shape(config(use_aux_norm=True)).fc_norm


def block_config(**changes: Any) -> dict[str, Any]:
    """The config of a DFlash drafter of two layers, as published."""
    return config(
        **{
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": 8,
            "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 4]},
            "draft_vocab_size": None,
            "layer_types": ["full_attention", "full_attention"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "num_target_layers": 6,
            "sliding_window": None,
            "use_sliding_window": False,
            **changes,
        }
    )


NESTED = {"mask_token_id": 39, "target_layer_ids": [1, 4]}


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["whole context (layer_types"]),
        # As transformers fills in what is missing.
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8},
            ["whole context (layer_types, sliding_window)"],
        ),
        ({"is_causal": True}, ["its blocks are causal (is_causal)"]),
        ({"attention_bias": True}, ["biases (attention_bias)"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["scaled (yarn)"]),
        ({"is_neox_style": False}, ["pairs of neighbours"]),
        ({"use_gemma_norm": True}, ["use_gemma_norm (True)"]),
        (
            {"architectures": ["DFlashLagunaForCausalLM"], "gating": "per-head"},
            ["Laguna", "gating"],
        ),
        # MiMo
        (
            {
                "dflash_config": NESTED
                | {
                    "use_swa": True,
                    "swa_window_size": 1024,
                    "backbone_rotary_base": 5000000,
                    "attention_value_scale": 0.612,
                    "attention_sink_bias": True,
                },
                "partial_rotary_factor": 0.5,
            },
            [
                "dflash_config.use_swa (True)",
                "dflash_config.swa_window_size (1024)",
                "dflash_config.backbone_rotary_base (5000000)",
                "dflash_config.attention_value_scale (0.612)",
                "dflash_config.attention_sink_bias (True)",
                "rotates 0.5 of a head (partial_rotary_factor)",
            ],
        ),
        # Domino
        (
            {
                "dflash_config": NESTED
                | {
                    "projector_type": "domino",
                    "pure_draft_prefix_len": 1,
                    "emb_dim": 256,
                    "gru_hidden_dim": 1024,
                    "shift_label": True,
                }
            },
            [
                "dflash_config.projector_type ('domino')",
                "dflash_config.pure_draft_prefix_len (1)",
                "dflash_config.emb_dim (256)",
                "dflash_config.gru_hidden_dim (1024)",
                "dflash_config.shift_label (True)",
            ],
        ),
        ({"projector_type": "domino"}, ["projector_type ('domino')"]),
        # DFlash2
        (
            {
                "architectures": ["DFlash2DraftModel"],
                "dflash_config": NESTED | {"conv_kernel_size": 2, "selector_rank": 256},
            },
            [
                "it is a DFlash2DraftModel",
                "dflash_config.conv_kernel_size (2)",
                "dflash_config.selector_rank (256)",
            ],
        ),
        # DSpark
        (
            {
                "architectures": ["DSparkDraftModel"],
                "dflash_config": NESTED | {"projector_type": "dspark", "markov_rank": 256},
            },
            ["it is a DSparkDraftModel", "dflash_config.markov_rank (256)"],
        ),
        # Nemotron 3.5
        (
            {"has_embed_tokens": True, "quantization_config": {"quant_algo": "W4A16_NVFP4"}},
            ["has_embed_tokens (True)", "quantization_config ("],
        ),
        ({"a_field_of_tomorrow": 0}, ["a_field_of_tomorrow (0)"]),
        ({"dflash_config": NESTED | {"of_tomorrow": False}}, ["dflash_config.of_tomorrow (False)"]),
        # speculators
        (
            {"transformer_layer_config": {"hidden_size": 32}, "draft_vocab_size": 20},
            ["transformer_layer_config", "(draft_vocab_size)"],
        ),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, ["has no mask_token_id"]),
        ({"dflash_config": {"mask_token_id": 39}, "num_target_layers": None}, ["no target_layer"]),
        ({"dflash_config": NESTED | {"target_layer_ids": [4, 1]}}, ["not ascending"]),
        ({"dflash_config": NESTED | {"target_layer_ids": [1, 6]}}, ["name layer 6"]),
        ({"dflash_config": NESTED | {"target_layer_ids": []}}, ["are empty"]),
        ({"dflash_config": NESTED | {"mask_token_id": 40}}, ["mask token 40 is outside"]),
        ({"block_size": 1}, ["drafts nothing"]),
        ({"block_size": "many"}, ["its block_size is 'many'"]),
        ({"layer_types": 3}, ["its config cannot be read"]),
        ({"architectures": "DFlashDraftModel"}, ["not a list of names"]),
        ({"hidden_size": "32", "head_dim": None}, ["its config cannot be read"]),
    ],
)
def test_a_block_drafter_that_a_student_does_not_follow_is_refused_by_the_field(
    changes: dict[str, Any], reasons: list[str]
) -> None:
    with pytest.raises(UnsupportedDrafterError) as raised:
        dflash_shape(block_config(**changes))
    for reason in reasons:
        assert reason in str(raised.value)


def test_a_block_drafters_sizes_are_read_where_sglang_reads_them() -> None:
    expected = DFlashShape(decoder_shape(block_config()), (1, 4), 8, 39)
    assert dflash_shape(block_config()) == expected
    inside = {"dflash_config": NESTED | {"block_size": 8, "num_target_layers": 6}}
    top_level_fields = {"dflash_config": None, "target_layer_ids": [1, 4], "mask_token_id": 39}
    assert dflash_shape(block_config(block_size=None, **inside)) == expected
    assert dflash_shape(block_config(**top_level_fields)) == expected
    assert dflash_shape(block_config(block_size=None)).block == 16
    # SpecForge writes it.
    assert dflash_shape(block_config(draft_vocab_size=40)) == expected
    plain = {
        "attention_value_scale": 1.0,
        "conv_kernel_size": 0,
        "output_multiplier": 1,
        "projector_type": None,
        "shift_label": False,
    }
    assert dflash_shape(block_config(dflash_config=NESTED | plain)) == expected


def test_layers_and_a_mask_that_the_config_does_not_name_are_those_of_the_engine() -> None:
    unnamed = block_config(dflash_config=None)
    drafter_shape = dflash_shape(unnamed, target_layers=24, unnamed_mask=7)
    # As SGLang chooses: from the second to the fourth from last.
    assert (drafter_shape.feature_layers, drafter_shape.mask_token) == ((1, 21), 7)
    assert dflash_shape(unnamed, unnamed_mask=7).feature_layers == (1, 3)
    free = block_config(dflash_config=None, num_target_layers=None)
    assert dflash_shape(free, unnamed_layers=(2, 5), unnamed_mask=7).feature_layers == (2, 5)
    assert dflash_shape(block_config(), target_layers=24, unnamed_mask=7).mask_token == 39


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel_drafting": True}, "parallel_drafting (True)"),
        ({"norm_before_residual": True}, "norm_before_residual (True)"),
        ({"attention_chunk_size": 0}, "attention_chunk_size (0)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config ({'bits': 4})"),
        ({"eagle_config": {"of_tomorrow": False}}, "eagle_config.of_tomorrow (False)"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm (True)"),
        ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm"),
        ({"eagle_config": {EAGLE_LAYERS: []}}, "an empty list of target layers"),
        ({EAGLE_LAYERS: [1, 2, 3, 4]}, "reads 3 hidden states, and 4 target layers"),
        ({"eagle_config": [1]}, "its eagle_config is [1], not an object"),
        ({"speculators_config": {"algorithm": "eagle3"}}, "speculators_config"),
        ({"rope_scaling": 3}, "its config cannot be read"),
    ],
)
def test_a_field_that_nobody_knows_is_named_and_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedDrafterError) as raised:
        eagle3_shape(config(**changes))
    assert reason in str(raised.value)


def test_what_is_known_and_what_is_unset_is_no_obstacle() -> None:
    layers = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    unset: dict[str, Any] = {"of_tomorrow": None, "empty": {}, "nothing": [], "no_text": ""}
    sizes = eagle3_shape(config())
    assert eagle3_shape(config(eagle_config=layers, torch_dtype="bfloat16", **unset)) == sizes
    assert eagle3_shape(config(**{EAGLE_LAYERS: [1, 2, 3]})).feature_layers == (1, 2, 3)


def test_all_obstacles_are_named_at_once() -> None:
    with pytest.raises(UnsupportedDrafterError) as raised:
        eagle3_shape(config(bias=True, partial_rotary_factor=0.5, of_tomorrow=1))
    for part in ("have biases", "of_tomorrow (1)", "rotates 0.5 of a head"):
        assert part in str(raised.value)


def test_a_predictors_target_is_read_by_the_same_rule() -> None:
    known = config(draft_vocab_size=None, num_nextn_predict_layers=1, attention_bias=True)
    assert mtp_shape(known).decoder.hidden == SHAPE.hidden
    with pytest.raises(UnsupportedDrafterError, match=r"dual_chunk_attention_config \("):
        mtp_shape(known | {"dual_chunk_attention_config": {"chunk_size": 8}})
    with pytest.raises(UnsupportedDrafterError, match="of_tomorrow"):
        mtp_shape(known | {"of_tomorrow": 1})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3"])
def test_what_transformers_writes_into_every_config_is_known(kind: str) -> None:
    config_fields = AutoConfig.for_model(kind).to_dict()
    for known in (EAGLE3_FIELDS, DFLASH_FIELDS, MTP_FIELDS):
        assert unknown_fields(config_fields, known) == []


def test_what_sglang_writes_into_a_live_config_is_known() -> None:
    """`ModelConfig` and `adjust_config_with_unaligned_cpu_tp`; engine tests learn with them."""
    live = {
        "context_len": 2048,
        "encoder_only": False,
        "language_model_only": False,
        "language_only": False,
        "original_num_attention_heads": SHAPE.heads,
        "original_total_num_kv_heads": SHAPE.kv_heads,
        "swa_head_dim": SHAPE.head_dim,
        "swa_v_head_dim": SHAPE.head_dim,
        "v_head_dim": SHAPE.head_dim,
    }
    assert eagle3_shape(config(**live)) == eagle3_shape(config())
    assert dflash_shape(block_config(**live)) == dflash_shape(block_config())
    assert mtp_shape(config(draft_vocab_size=None, **live)).decoder.heads == SHAPE.heads
    with pytest.raises(UnsupportedDrafterError, match="its values have 3 numbers, its keys 16"):
        eagle3_shape(config(v_head_dim=3))


# Names of a kind of model, of which Llama 4 is refused, and a token that no class computes with.
HARMLESS = {"model_type", "pad_token_id"}


@pytest.mark.parametrize("module", ["llama_eagle3", "llama", "dflash", "mimo_mtp", "qwen2"])
def test_no_field_that_sglang_computes_with_is_passed_over(module: str) -> None:
    tree = Wheel(sglang_version()).module(f"sglang.srt.models.{module}")
    read: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            read.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and "getattr" in ast.unparse(node.func)
        ):
            read |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    assert {"hidden_size", "rms_norm_eps"} <= read
    assert read & INERT_FIELDS <= HARMLESS
