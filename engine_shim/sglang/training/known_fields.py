"""Lists the fields of drafters' `config.json` that a student follows, and names what else is set.

A field that nobody here knows may change what is computed, and then a student that passes over it
would learn something else than what serves.  So these lists say what is known, by kind of drafter,
and every other field that is set is an obstacle.  A test holds them against what SGLang's classes
read and against what transformers writes into every config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS

# Characters of a value that a message quotes.
_LONGEST_VALUE: Final = 40


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Says nothing about what is computed in service: names, versions, types of stored weights, ids of
# the tokenizer, dropout and initial values of training, and options of transformers' generation and
# task heads, which its older versions write into every config.
INERT: Final = _names(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attention_dropout attn_implementation auto_map dtype embd_pdrop hidden_dropout
    initializer_range model_type name_or_path pretraining_tp resid_pdrop target_model_type
    tokenizer_class torch_dtype transformers_version unsloth_version use_cache
    bos_token_id cls_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id
    unk_token_id
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p
    torchscript typical_p use_bfloat16
    """
)
# Read by `configs.decoder_shape`.
_DECODER: Final = _names(
    """
    head_dim hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor
    rms_norm_eps rope_is_neox_style rope_parameters rope_scaling rope_theta vocab_size
    """
)
# SGLang writes them into every live config: the context, the parts that serve, the heads before
# they are padded for a processor's ranks, and sizes that only models with sliding windows have.
_OF_SGLANG: Final = _names(
    """
    context_len encoder_only language_model_only language_only original_num_attention_heads
    original_total_num_kv_heads swa_head_dim swa_v_head_dim v_head_dim
    """
)
# SGLang's classes of EAGLE3 and MiMo drafters see the whole context, whatever these say.
_WINDOWS: Final = frozenset(
    ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Lists the fields of one kind of drafter.

    followed: are read, or say nothing.  plain: are known to change what is computed, unless they
    have this value.  sections: the same for the parts of a config that are objects, by their names.
    """

    followed: frozenset[str]
    plain: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, KnownFields] = field(default_factory=dict)


EAGLE3_FIELDS: Final = KnownFields(
    INERT
    | _DECODER
    | _OF_SGLANG
    | _WINDOWS
    | {EAGLE_LAYERS, "num_aux_hidden_states", "target_hidden_size"}
    | {"draft_vocab_size", "tie_word_embeddings"}
    | {"fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"}
    | {"attention_bias", "bias", "mlp_bias"},
    sections={
        "eagle_config": KnownFields(
            # SGLang does not read `has_lm_head`; `draft_vocab_size` says whether there is one.
            frozenset({EAGLE_LAYERS, "use_aux_hidden_state", "norm_before_fc", "has_lm_head"}),
            # As every EAGLE3 drafter has them; in configs of NVIDIA's Model Optimizer.
            {
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        )
    },
)
_BLOCKS: Final = frozenset(
    ("block_size", "mask_token", "mask_token_id", "num_target_layers", "target_layer_ids")
)
DFLASH_FIELDS: Final = KnownFields(
    INERT
    | _DECODER
    | _OF_SGLANG
    | _WINDOWS
    | _BLOCKS
    # Embedding and head are the target's, and SGLang's MLPs have no biases.
    | {"attention_bias", "is_causal", "is_neox_style", "mlp_bias", "tie_word_embeddings"}
    # SpecForge writes the size of the target's vocabulary.
    | {"draft_vocab_size"},
    {"bias": False, "has_embed_tokens": False, "has_lm_head": False, "use_gemma_norm": False},
    {
        "dflash_config": KnownFields(
            _BLOCKS,
            {
                "attention_sink_bias": False,
                "attention_value_scale": 1.0,
                "conv_group_size": 0,
                "conv_kernel_size": 0,
                "final_logit_softcapping": 0,
                "output_multiplier": 1.0,
                "pure_draft_prefix_len": 0,
                "selector_rank": 0,
                "selector_top_k": 0,
                "shift_label": False,
                "use_swa": False,
            },
        )
    },
)
# Of the target, whose config a predictor shares; a Qwen2's queries, keys and values have biases.
MTP_FIELDS: Final = KnownFields(
    INERT
    | _DECODER
    | _OF_SGLANG
    | _WINDOWS
    | {"attention_bias", "mlp_bias", "num_nextn_predict_layers", "tie_word_embeddings"}
)


def unknown_fields(config: Mapping[str, Any], known: KnownFields) -> list[str]:
    """Names each field that is set and not known, or known to change the computation: "a.b (1)"."""
    return _unknown(config, known, "")


def _unknown(config: Mapping[str, Any], known: KnownFields, before: str) -> list[str]:
    found: list[str] = []
    for name, value in config.items():
        part = known.sections.get(name)
        if part is not None and isinstance(value, Mapping):
            found += _unknown(value, part, f"{before}{name}.")
        elif part is None and name not in known.followed and not _says_nothing(name, value, known):
            text = repr(value)
            short = text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
            found.append(f"{before}{name} ({short})")
    return sorted(found)


def _says_nothing(name: str, value: Any, known: KnownFields) -> bool:
    if value is None or (isinstance(value, str | list | tuple | Mapping) and not value):
        return True
    return name in known.plain and bool(value == known.plain[name])
