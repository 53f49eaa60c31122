"""Reads drafters' configs as SGLang does, and refuses what has no student here.

A config is a `config.json` as it was published, or what transformers has made of it.  SGLang's
reading is that of its classes `LlamaForCausalLMEagle3`, `DFlashDraftModel` and `MiMoMTP`, their
defaults included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from engine_shim.training.blocks import DecoderShape, Llama3Rope
from engine_shim.training.dflash import DFlashShape
from engine_shim.training.eagle3 import Eagle3Shape
from engine_shim.training.mtp import MtpShape

EAGLE3: Final = "LlamaForCausalLMEagle3"
EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
# Fields of DecoderShape, and their names in a config.
DECODER_KEYS: Final = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "rope_base": "rope_theta",
}
# What transformers takes where a config of a Llama does not say.
_DEFAULTS: Final = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
# Of an unscaled rotary embedding; the last one says nothing without scaling.
_ROTARY_KEYS: Final = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


class UnsupportedDrafterError(ValueError):
    """A drafter that has no student; the message says why, and reads on after "the drafter: "."""


def eagle3_shape(config: Mapping[str, Any]) -> Eagle3Shape:
    """Takes the sizes of an EAGLE3 draft.  Raises UnsupportedDrafterError.

    SGLang takes the head from the target where ``tie_word_embeddings`` is true or
    ``draft_vocab_size`` is null.
    """
    architectures = config.get("architectures") or [EAGLE3]
    eagle = config.get("eagle_config") or {}
    layers = tuple(eagle.get(EAGLE_LAYERS) or ())
    tied, drafts = config.get("tie_word_embeddings"), config.get("draft_vocab_size")
    own_head = not tied and drafts is not None
    decoder = decoder_shape(config)
    features = config.get("num_aux_hidden_states")
    target_width = config.get("target_hidden_size", decoder.hidden)
    _refuse(
        {
            f"it is a {', '.join(architectures)}, not a {EAGLE3}": EAGLE3 not in architectures,
            "it reads the target's last hidden state only (use_aux_hidden_state is false)": (
                not eagle.get("use_aux_hidden_state", True)
            ),
            f"it reads hidden states of {target_width} numbers, and its own have "
            f"{decoder.hidden}": target_width != decoder.hidden,
            "its projections have biases": bool(
                config.get("attention_bias") or config.get("mlp_bias") or config.get("bias")
            ),
            "it is a part of a Llama 4, with sizes of its own": config.get("model_type")
            == "llama4_text",
            f"it drafts {drafts} of {decoder.vocabulary} tokens with the target's embedding as "
            "head": bool(tied) and drafts not in (None, decoder.vocabulary),
        }
    )
    try:
        shape = Eagle3Shape(
            decoder,
            layers,
            draft_vocabulary=drafts if own_head and drafts != decoder.vocabulary else None,
            own_head=own_head,
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_output=bool(config.get("norm_output")),
        )
    except ValueError as error:
        raise UnsupportedDrafterError(str(error)) from error
    _refuse(
        {
            f"it reads {features} hidden states, and {shape.features} target layers are captured": (
                features not in (None, shape.features)
            )
        }
    )
    return shape


def draft_tokens(hot: Tensor | None, shape: Eagle3Shape) -> Tensor | None:
    """Returns the draft vocabulary as `Borrowed.tokens`.  Raises UnsupportedDrafterError.

    hot: SGLang's ``hot_token_id``, the target's id of each token that the draft has (``d2t`` plus
    the draft's own id); None for a draft that keeps no such list, whose ids are the target's.
    """
    tokens = torch.arange(shape.drafts) if hot is None else hot.to(torch.int64)
    size = shape.decoder.vocabulary
    _refuse(
        {
            f"its d2t has {len(tokens)} tokens, its head {shape.drafts}": len(tokens)
            != shape.drafts,
            f"its d2t names tokens that the target's {size} do not contain": bool(
                ((tokens < 0) | (tokens >= size)).any()
            ),
            "its d2t names a token twice": len(tokens.unique()) != len(tokens),
        }
    )
    if len(tokens) == size and bool((tokens.cpu() == torch.arange(size)).all()):
        return None
    _refuse({"its d2t reorders the target's head": not shape.own_head})
    return tokens


def dflash_shape(
    config: Mapping[str, Any], feature_layers: int, block: int, mask_token: int
) -> DFlashShape:
    """Takes a student's sizes from a drafter's config and from the engine that serves it.

    feature_layers: how many target layers it reads; a config that does not say which has 0, 1, ...
    Raises UnsupportedDrafterError.
    """
    types = set(config.get("layer_types") or ())
    _refuse(
        {
            "its layers do not see the whole context": bool(types - {"full_attention"}),
            "its blocks are causal": bool(config.get("is_causal")),
        }
    )
    named = (config.get("dflash_config") or {}).get("target_layer_ids")
    if named is None or len(named) != feature_layers:
        named = range(feature_layers)
    return DFlashShape(decoder_shape(config), tuple(named), block, mask_token)


def mtp_shape(config: Mapping[str, Any]) -> MtpShape:
    """Takes a predictor's sizes from its target's config.  Raises UnsupportedDrafterError."""
    return MtpShape(decoder_shape({**config, "num_hidden_layers": 1}))


def decoder_shape(config: Mapping[str, Any], *, may_stretch: bool = False) -> DecoderShape:
    """Takes the sizes of the layers.  Raises UnsupportedDrafterError.

    may_stretch: whether rotary positions may be scaled as Llama 3.1's.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    activation = config.get("hidden_act", "silu")
    partial = rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    scaling = _scaling(rotary)
    rope = None
    if may_stretch and scaling == "llama3":
        rope, scaling = _llama3_rope(rotary), None
    _refuse(
        {
            f"its rotary positions are scaled ({scaling}), which a student does not do": scaling
            is not None,
            f"it rotates {partial} of a head": partial != 1,
            "it rotates pairs of neighbours (rope_is_neox_style is false)": not config.get(
                "rope_is_neox_style", True
            ),
            f"its activation is {activation}, a student's silu": activation != "silu",
        }
    )
    found = {**_DEFAULTS, **{key: part for key, part in config.items() if part is not None}}
    found["rope_theta"] = rotary.get("rope_theta") or found["rope_theta"]
    try:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
        found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
        sizes = {field: found[key] for field, key in DECODER_KEYS.items()}
        return DecoderShape(**sizes, rope=rope)
    except KeyError as error:
        raise UnsupportedDrafterError(f"its config has no {error.args[0]}") from error


def _llama3_rope(rotary: Mapping[str, Any]) -> Llama3Rope:
    """Reads the scaling of Llama 3.1.  Raises UnsupportedDrafterError."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [rotary.get(name) for name in names]
    numbers = [value for value in values if isinstance(value, int | float) and value > 0]
    _refuse({"its llama3 scaling lacks a number above 0": len(numbers) != len(names)})
    factor, low, high, original = numbers
    _refuse({"its llama3 scaling has no frequencies between low and high": low >= high})
    return Llama3Rope(factor, low, high, int(original))


def _scaling(rotary: Mapping[str, Any]) -> str | None:
    """Names the scaling of rotary positions; None if there is no scaling."""
    if "mrope_section" in rotary:
        # SGLang calls it "default" once it has read the config.
        return "mrope"
    kind = rotary.get("rope_type") or rotary.get("type")
    if kind not in (None, "default"):
        return str(kind)
    unknown = sorted(rotary.keys() - _ROTARY_KEYS)
    return f"{', '.join(unknown)} of an unknown type" if unknown else None


def _refuse(obstacles: Mapping[str, bool]) -> None:
    """Raises UnsupportedDrafterError with the first obstacle that is there."""
    for reason, is_so in obstacles.items():
        if is_so:
            raise UnsupportedDrafterError(reason)
