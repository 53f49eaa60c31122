"""Reads the drafter-specific fields of a `config.json`, wherever SGLang reads them.

A config is a published `config.json`, or the result of transformers' `to_dict`.  Fields are read
like in SGLang: for DFlash by `parse_dflash_draft_config`, for EAGLE3 by `LlamaForCausalLMEagle3`
and the code that chooses its target layers.  A test compares both readings.
:mod:`engine_shim.sglang.training.students` decides whether a student computes the same.

An unknown field may change the computation, and a student that ignores it would then differ from
the serving drafter.  So there is a list of fields that a student follows for each kind of drafter,
and every other field that is set is an obstacle.  A test compares the lists with what SGLang's
classes read and with what transformers writes into every config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

EAGLE3: Final = "LlamaForCausalLMEagle3"
DFLASH: Final = "DFlashDraftModel"
EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
NO_EAGLE_LAYERS: Final = f"config.json has no {EAGLE_LAYERS} in its eagle_config"
# SGLang's defaults for missing fields of a DFlash config.
DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_MASK_TEXT: Final = "<|MASK|>"
# Number of target layers that an EAGLE3 drafter reads in SGLang if its config does not say.
DEFAULT_FEATURE_COUNT: Final = 3
# DFlash drafters of several layers that name no target layers read layers from the second one to
# the fourth from last.
_FIRST_READ_LAYER: Final = 1
_SKIPPED_LAST_LAYERS: Final = 3

# Characters of a value that a message quotes.
_MAX_VALUE_CHARACTERS: Final = 40
# SGLang's classes of EAGLE3 and MiMo drafters ignore these and attend to the whole context.
_WINDOW_FIELDS: Final = frozenset(
    ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
)
_BLOCK_FIELDS: Final = frozenset(
    ("block_size", "mask_token", "mask_token_id", "num_target_layers", "target_layer_ids")
)


class DrafterConfigError(ValueError):
    """A config that SGLang could not read; the message names the field."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """The fields of a DFlash drafter's config about its blocks and the target layers it reads.

    block: tokens of a block, the newest one included.  layers: number of the drafter's own layers.
    target_layers: number of layers of the target it was trained for.  named_layers: the target's
    layers that it reads, in the config's order; None if SGLang chooses them.  mask_token: text of
    the token that stands for the unknown tokens.  mask_id: its id; None if SGLang asks the target's
    tokenizer.
    """

    block: int
    layers: int | None
    target_layers: int | None
    named_layers: tuple[int, ...] | None
    mask_token: str
    mask_id: int | None

    def feature_layers(self, target_layers: int) -> tuple[int, ...]:
        """Returns the layers that it reads of such a target.  Raises DrafterConfigError."""
        if self.named_layers is None:
            return self._chosen_layers(target_layers)
        for layer in self.named_layers:
            if not 0 <= layer < target_layers:
                raise DrafterConfigError(
                    f"its target_layer_ids name layer {layer}, and the target has {target_layers}"
                )
        return self.named_layers

    def _chosen_layers(self, target_layers: int) -> tuple[int, ...]:
        if self.layers is None:
            raise DrafterConfigError("its config has neither target_layer_ids nor layers")
        if target_layers < 1:
            raise DrafterConfigError(f"a target of {target_layers} layers has none to read")
        if self.layers == 1:
            return (target_layers // 2,)
        span = target_layers - _SKIPPED_LAST_LAYERS - _FIRST_READ_LAYER
        if span < 0:
            raise DrafterConfigError(
                f"its config names no target_layer_ids, and a target of {target_layers} layers has "
                "too few to choose from"
            )
        return tuple(
            round(_FIRST_READ_LAYER + index * span / (self.layers - 1))
            for index in range(self.layers)
        )


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The fields of an EAGLE3 drafter's config about what it reads from the target.

    named_layers: the target's layers that it was trained for; None if its config names none.
    captured_layers: the layers that SGLang makes the target emit, read from `eagle_config` only;
    None if SGLang chooses three.  features: number of hidden states that its `fc` reads.
    target_width: numbers of each; None if the config says null.  uses_features: whether it reads
    these hidden states, or the target's last one.  norm_before_fc: whether one norm acts on all of
    them.  fc_norm: whether one norm acts on each.  norm_output: whether the next draft step gets
    the normed hidden state.
    """

    named_layers: tuple[int, ...] | None
    captured_layers: tuple[int, ...] | None
    features: int
    target_width: int | None
    uses_features: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def read_dflash(config: Mapping[str, Any]) -> DFlashConfig:
    """Reads a DFlash drafter's config; a field in `dflash_config` overrides a top-level one.

    Raises DrafterConfigError.
    """
    _require_mapping(config, "config")
    section = dflash_section(config)

    def read_field(name: str) -> Any:
        return section[name] if name in section else config.get(name)

    mask_token = read_field("mask_token")
    mask_token = DEFAULT_MASK_TEXT if mask_token is None else mask_token
    if not isinstance(mask_token, str) or not mask_token:
        raise DrafterConfigError(f"its mask_token is {mask_token!r}, not a text")
    mask_id = read_field("mask_token_id")
    if mask_id is not None and not _is_count(mask_id):
        raise DrafterConfigError(f"its mask_token_id is {mask_id!r}, not a token id")
    block = _positive_count(read_field("block_size"), "block_size")
    return DFlashConfig(
        block=DEFAULT_BLOCK_SIZE if block is None else block,
        layers=_positive_count(text_config(config).get("num_hidden_layers"), "num_hidden_layers"),
        target_layers=_positive_count(read_field("num_target_layers"), "num_target_layers"),
        named_layers=_target_layers(read_field("target_layer_ids")),
        mask_token=mask_token,
        mask_id=mask_id,
    )


def read_eagle3(config: Mapping[str, Any]) -> Eagle3Config:
    """Reads an EAGLE3 drafter's config.  Raises DrafterConfigError."""
    _require_mapping(config, "config")
    section = eagle_section(config)
    captured_layers = _layer_list(section.get(EAGLE_LAYERS), f"eagle_config.{EAGLE_LAYERS}")
    top_level_layers = _layer_list(config.get(EAGLE_LAYERS), EAGLE_LAYERS)
    features = config.get("num_aux_hidden_states")
    if features is None:
        features = len(captured_layers) if captured_layers else DEFAULT_FEATURE_COUNT
    elif not _is_count(features) or not features:
        raise DrafterConfigError(f"its num_aux_hidden_states is {features!r}, not a count")
    width = config.get("target_hidden_size", config.get("hidden_size"))
    return Eagle3Config(
        named_layers=top_level_layers if captured_layers is None else captured_layers,
        captured_layers=captured_layers,
        features=features,
        target_width=_positive_count(width, "target_hidden_size"),
        uses_features=bool(section.get("use_aux_hidden_state", True)),
        norm_before_fc=bool(section.get("norm_before_fc", config.get("norm_before_fc"))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output")),
    )


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the class names in a config.  Raises DrafterConfigError."""
    names = config.get("architectures") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DrafterConfigError(f"its architectures are {names!r}, not a list of names")
    return tuple(names)


def dflash_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the field `dflash_config`; empty if it is missing or, as in SGLang, not an object."""
    try:
        return dict(config.get("dflash_config") or {})
    except (TypeError, ValueError):
        return {}


def eagle_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `eagle_config`, empty if it is missing.  Raises DrafterConfigError."""
    return _require_mapping(config.get("eagle_config") or {}, "eagle_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part that describes the layers: `text_config`, or else the whole config.

    Raises DrafterConfigError.
    """
    section = config.get("text_config")
    return config if section is None else _require_mapping(section, "text_config")


def _require_mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DrafterConfigError(f"its {name} is {value!r:.80}, not an object")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive_count(value: Any, name: str) -> int | None:
    """Reads an integer above 0, in any form that `int` accepts, like SGLang."""
    if value is None:
        return None
    try:
        parsed = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DrafterConfigError(f"its {name} is {value!r:.80}, not an integer") from error
    if parsed < 1:
        raise DrafterConfigError(f"its {name} is {parsed}, and must be 1 or more")
    return parsed


def _target_layers(value: Any) -> tuple[int, ...] | None:
    layers = _layer_list(value, "target_layer_ids")
    if layers == ():
        raise DrafterConfigError("its target_layer_ids are empty")
    return layers


def _layer_list(value: Any, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DrafterConfigError(f"its {name} is {value!r:.80}, not a list of layers")
    try:
        return tuple(int(layer) for layer in value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DrafterConfigError(f"its {name} is {value!r:.80}, not a list of layers") from error


def _field_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields without effect on the computation in service: names, versions, types of stored weights, ids
# of the tokenizer, dropout and initial values of training, and options of transformers' generation
# and task heads, which its older versions write into every config.
INERT_FIELDS: Final = _field_names(
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
# Read by `students.decoder_shape`.
_DECODER_FIELDS: Final = _field_names(
    """
    head_dim hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor
    rms_norm_eps rope_is_neox_style rope_parameters rope_scaling rope_theta vocab_size
    """
)
# Fields that SGLang writes into every live config: the context, the parts that serve, the heads
# before padding for CPU ranks, and sizes that only models with sliding windows have.
_SGLANG_FIELDS: Final = _field_names(
    """
    context_len encoder_only language_model_only language_only original_num_attention_heads
    original_total_num_kv_heads swa_head_dim swa_v_head_dim v_head_dim
    """
)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Lists the fields of one kind of drafter.

    followed: fields that are read or have no effect.  neutral_values: fields that change the
    computation unless they have the given value.  sections: the same for nested objects, by their
    names.
    """

    followed: frozenset[str]
    neutral_values: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, KnownFields] = field(default_factory=dict)


EAGLE3_FIELDS: Final = KnownFields(
    INERT_FIELDS
    | _DECODER_FIELDS
    | _SGLANG_FIELDS
    | _WINDOW_FIELDS
    | {EAGLE_LAYERS, "num_aux_hidden_states", "target_hidden_size"}
    | {"draft_vocab_size", "tie_word_embeddings"}
    | {"fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"}
    | {"attention_bias", "bias", "mlp_bias"},
    sections={
        "eagle_config": KnownFields(
            # SGLang does not read `has_lm_head`; `draft_vocab_size` says whether there is one.
            frozenset({EAGLE_LAYERS, "use_aux_hidden_state", "norm_before_fc", "has_lm_head"}),
            # NVIDIA's Model Optimizer writes these; the values are those of every EAGLE3 drafter.
            {
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        )
    },
)
DFLASH_FIELDS: Final = KnownFields(
    INERT_FIELDS
    | _DECODER_FIELDS
    | _SGLANG_FIELDS
    | _WINDOW_FIELDS
    | _BLOCK_FIELDS
    # Embedding and head are the target's, and SGLang's MLPs have no biases.
    | {"attention_bias", "is_causal", "is_neox_style", "mlp_bias", "tie_word_embeddings"}
    # SpecForge writes the size of the target's vocabulary.
    | {"draft_vocab_size"},
    {"bias": False, "has_embed_tokens": False, "has_lm_head": False, "use_gemma_norm": False},
    {
        "dflash_config": KnownFields(
            _BLOCK_FIELDS,
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
# A predictor shares the config of its target.  Queries, keys and values of a Qwen2 have biases.
MTP_FIELDS: Final = KnownFields(
    INERT_FIELDS
    | _DECODER_FIELDS
    | _SGLANG_FIELDS
    | _WINDOW_FIELDS
    | {"attention_bias", "mlp_bias", "num_nextn_predict_layers", "tie_word_embeddings"}
)


def unknown_fields(config: Mapping[str, Any], known_fields: KnownFields) -> list[str]:
    """Returns each unknown field that is set, and each known one that changes the computation.

    A field is written as "a.b (1)", with its value.
    """
    return _unknown_in_section(config, known_fields, "")


def _unknown_in_section(
    config: Mapping[str, Any], known_fields: KnownFields, prefix: str
) -> list[str]:
    descriptions: list[str] = []
    for name, value in config.items():
        section_fields = known_fields.sections.get(name)
        if section_fields is not None and isinstance(value, Mapping):
            descriptions += _unknown_in_section(value, section_fields, f"{prefix}{name}.")
        elif (
            section_fields is None
            and name not in known_fields.followed
            and not _is_neutral(name, value, known_fields)
        ):
            text = repr(value)
            short = (
                text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
            )
            descriptions.append(f"{prefix}{name} ({short})")
    return sorted(descriptions)


def _is_neutral(name: str, value: Any, known_fields: KnownFields) -> bool:
    if value is None or (isinstance(value, str | list | tuple | Mapping) and not value):
        return True
    return name in known_fields.neutral_values and bool(value == known_fields.neutral_values[name])
