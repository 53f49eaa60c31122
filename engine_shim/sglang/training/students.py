"""Makes the student of a drafter, a trainable copy in plain torch, by the drafter's config.

A config is a published `config.json`, or what transformers has made of it.  It is read like in
SGLang's classes `LlamaForCausalLMEagle3`, `DFlashDraftModel` and `MiMoMTP`, with the same defaults.
:mod:`engine_shim.sglang.training.drafter_config` reads the drafter-specific fields.  A drafter
without a student is refused.

For all kinds, `unroll` returns the logits of each draft step from every row, the tensors of
`Borrowed` are never trained, and the ``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import Borrowed, DecoderShape, Llama3Rope
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student, MtpShape, MtpStudent
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.drafter_config import (
    DFLASH,
    DFLASH_FIELDS,
    EAGLE3,
    EAGLE3_FIELDS,
    MTP_FIELDS,
    DrafterConfigError,
    architectures,
    read_dflash,
    read_eagle3,
    unknown_fields,
)

DraftShape = Eagle3Shape | DFlashShape | MtpShape
DraftStudent = Eagle3Student | DFlashStudent | MtpStudent

_SHAPE_CLASSES: Final[dict[str, type[DraftShape]]] = {
    "eagle3": Eagle3Shape,
    "dflash": DFlashShape,
    "mtp": MtpShape,
}

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
# Defaults of transformers for a Llama's config.
_DEFAULTS: Final = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
# Fields of an unscaled rotary embedding; the last one has no effect without scaling.
_ROTARY_KEYS: Final = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


def make_student(shape: DraftShape, borrowed: Borrowed) -> DraftStudent:
    """Makes an untrained student."""
    if isinstance(shape, Eagle3Shape):
        return Eagle3Student(shape, *borrowed)
    if isinstance(shape, MtpShape):
        return MtpStudent(shape, borrowed.embedding, borrowed.head)
    return DFlashStudent(shape, borrowed.embedding, borrowed.head)


def encode_shape(shape: DraftShape) -> dict[str, Any]:
    """Encodes a shape for JSON."""
    (kind,) = (
        name for name, shape_class in _SHAPE_CLASSES.items() if isinstance(shape, shape_class)
    )
    return {"kind": kind, **asdict(shape)}


def decode_shape(content: Mapping[str, Any]) -> DraftShape:
    """Decodes what `encode_shape` returned.  Raises KeyError, TypeError, ValueError."""
    sizes = dict(content)
    shape_class = _SHAPE_CLASSES[sizes.pop("kind")]
    sizes["decoder"] = DecoderShape(**sizes["decoder"])
    if "feature_layers" in sizes:
        sizes["feature_layers"] = tuple(sizes["feature_layers"])
    return shape_class(**sizes)


class UnsupportedDrafterError(ValueError):
    """A drafter has no student; the message gives the reason, and follows "the drafter: "."""


@contextmanager
def _refuse_malformed() -> Iterator[None]:
    """Raises UnsupportedDrafterError for any error that a malformed config causes inside."""
    try:
        yield
    except UnsupportedDrafterError:
        raise
    except DrafterConfigError as error:
        raise UnsupportedDrafterError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedDrafterError(f"its config cannot be read: {error!r}") from error


@_refuse_malformed()
def eagle3_shape(config: Mapping[str, Any]) -> Eagle3Shape:
    """Returns the sizes of an EAGLE3 drafter.  Raises UnsupportedDrafterError.

    SGLang takes the head from the target if ``tie_word_embeddings`` is true or ``draft_vocab_size``
    is null.  The feature layers are those that the drafter was trained for.
    """
    eagle3_config = read_eagle3(config)
    class_names = architectures(config) or (EAGLE3,)
    is_tied, draft_vocabulary = config.get("tie_word_embeddings"), config.get("draft_vocab_size")
    has_own_head = not is_tied and draft_vocabulary is not None
    obstacles = {
        f"it is a {', '.join(class_names)}, not a {EAGLE3}": EAGLE3 not in class_names,
        "it reads the target's last hidden state only (use_aux_hidden_state is false)": (
            not eagle3_config.uses_features
        ),
        "its eagle_config has an empty list of target layers, for which SGLang has the target emit "
        "none": eagle3_config.captured_layers == (),
        "its projections have biases": bool(
            config.get("attention_bias") or config.get("mlp_bias") or config.get("bias")
        ),
        "it is a part of a Llama 4, which has other sizes": config.get("model_type")
        == "llama4_text",
        **_unfollowed_obstacle(unknown_fields(config, EAGLE3_FIELDS)),
    }
    decoder = _require_decoder(obstacles, config)
    _raise_obstacles(
        {
            f"it reads hidden states of {eagle3_config.target_width} numbers, and its own have "
            f"{decoder.hidden}": eagle3_config.target_width != decoder.hidden,
            f"it drafts {draft_vocabulary} of {decoder.vocabulary} tokens with the target's "
            "embedding as "
            "head": bool(is_tied) and draft_vocabulary not in (None, decoder.vocabulary),
        }
    )
    try:
        shape = Eagle3Shape(
            decoder,
            eagle3_config.named_layers or (),
            draft_vocabulary=draft_vocabulary
            if has_own_head and draft_vocabulary != decoder.vocabulary
            else None,
            own_head=has_own_head,
            norm_before_fc=eagle3_config.norm_before_fc,
            fc_norm=eagle3_config.fc_norm,
            norm_output=eagle3_config.norm_output,
        )
    except ValueError as error:
        raise UnsupportedDrafterError(str(error)) from error
    _raise_obstacles(
        {
            f"it reads {eagle3_config.features} hidden states, and {shape.feature_count} target "
            "layers are "
            "captured": eagle3_config.features != shape.feature_count
        }
    )
    return shape


def draft_tokens(hot_token_ids: Tensor | None, shape: Eagle3Shape) -> Tensor | None:
    """Returns the draft vocabulary as `Borrowed.tokens`.  Raises UnsupportedDrafterError.

    hot_token_ids: SGLang's ``hot_token_id``, the target's id of each token of the drafter (``d2t``
    plus the drafter's own id); None for a drafter without such a list, whose ids are the target's.
    """
    tokens = (
        torch.arange(shape.draft_vocabulary_size)
        if hot_token_ids is None
        else hot_token_ids.to(torch.int64)
    )
    size = shape.decoder.vocabulary
    _raise_obstacles(
        {
            f"its d2t has {len(tokens)} tokens, its head {shape.draft_vocabulary_size}": len(tokens)
            != shape.draft_vocabulary_size,
            f"its d2t names tokens that the target's {size} do not contain": bool(
                ((tokens < 0) | (tokens >= size)).any()
            ),
            "its d2t names a token twice": len(tokens.unique()) != len(tokens),
        }
    )
    if len(tokens) == size and bool((tokens.cpu() == torch.arange(size)).all()):
        return None
    _raise_obstacles({"its d2t reorders the target's head": not shape.own_head})
    return tokens


@_refuse_malformed()
def dflash_shape(
    config: Mapping[str, Any],
    *,
    target_layers: int | None = None,
    unnamed_layers: tuple[int, ...] = (),
    unnamed_mask: int | None = None,
) -> DFlashShape:
    """Returns the sizes of a DFlash drafter.  Raises UnsupportedDrafterError.

    target_layers: number of layers of the target that serves; None for the number in its config.
    unnamed_layers: the target's layers that it reads if its config names none and the number of
    layers is unknown.  unnamed_mask: the mask token's id if its config has none.
    """
    dflash_config = read_dflash(config)
    class_names = architectures(config) or (DFLASH,)
    layer_types = set(config.get("layer_types") or ())
    # If the config has no layer_types, transformers derives them from these two fields.
    has_window = bool(config.get("use_sliding_window") and config.get("sliding_window"))
    mask = unnamed_mask if dflash_config.mask_id is None else dflash_config.mask_id
    layer_count = dflash_config.target_layers if target_layers is None else target_layers
    feature_layers = dflash_config.named_layers or unnamed_layers
    if layer_count is not None:
        feature_layers = dflash_config.feature_layers(layer_count)
    obstacles = {
        f"it is a {', '.join(class_names)}, not a {DFLASH}": DFLASH not in class_names,
        "its layers do not see the whole context (layer_types, sliding_window)": bool(
            layer_types - {"full_attention"} or (has_window and not layer_types)
        ),
        "its blocks are causal (is_causal)": bool(config.get("is_causal")),
        "its projections have biases (attention_bias)": bool(config.get("attention_bias")),
        "it drafts a part of its vocabulary (draft_vocab_size)": (
            config.get("draft_vocab_size") not in (None, config.get("vocab_size"))
        ),
        **_unfollowed_obstacle(unknown_fields(config, DFLASH_FIELDS)),
        "its config names no target_layer_ids": not feature_layers,
        "its config has no mask_token_id, and there is no tokenizer to look up its mask_token": (
            mask is None
        ),
    }
    decoder = _require_decoder(obstacles, config)
    assert mask is not None
    try:
        return DFlashShape(decoder, feature_layers, dflash_config.block, mask)
    except ValueError as error:
        raise UnsupportedDrafterError(str(error)) from error


@_refuse_malformed()
def mtp_shape(config: Mapping[str, Any]) -> MtpShape:
    """Returns a predictor's sizes by its target's config.  Raises UnsupportedDrafterError."""
    obstacles = _unfollowed_obstacle(unknown_fields(config, MTP_FIELDS))
    return MtpShape(_require_decoder(obstacles, {**config, "num_hidden_layers": 1}))


def decoder_shape(config: Mapping[str, Any], *, may_stretch: bool = False) -> DecoderShape:
    """Returns the sizes of the layers.  Raises UnsupportedDrafterError.

    may_stretch: whether rotary positions may be scaled as in Llama 3.1.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    pairs_halves = config.get("rope_is_neox_style", config.get("is_neox_style", True))
    activation = config.get("hidden_act", "silu")
    rotary_share = rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    scaling = _scaling(rotary)
    rope = None
    if may_stretch and scaling == "llama3":
        rope, scaling = _llama3_rope(rotary), None
    _raise_obstacles(
        {
            f"its rotary positions are scaled ({scaling}), which a student does not do": scaling
            is not None,
            f"it rotates {rotary_share} of a head (partial_rotary_factor)": rotary_share != 1,
            "it rotates pairs of neighbours (rope_is_neox_style is false)": not pairs_halves,
            f"its activation is {activation}, a student's silu": activation != "silu",
        }
    )
    values = config.get("v_head_dim")
    _raise_obstacles(
        {
            f"its values have {values} numbers, its keys {config.get('head_dim')}": (
                values not in (None, 0, config.get("head_dim"))
            )
        }
    )
    values_by_key = {**_DEFAULTS, **{key: part for key, part in config.items() if part is not None}}
    values_by_key["rope_theta"] = rotary.get("rope_theta") or values_by_key["rope_theta"]
    try:
        values_by_key.setdefault("num_key_value_heads", values_by_key["num_attention_heads"])
        values_by_key.setdefault(
            "head_dim", values_by_key["hidden_size"] // values_by_key["num_attention_heads"]
        )
        sizes = {field: values_by_key[key] for field, key in DECODER_KEYS.items()}
        return DecoderShape(**sizes, rope=rope)
    except KeyError as error:
        raise UnsupportedDrafterError(f"its config has no {error.args[0]}") from error


def _llama3_rope(rotary: Mapping[str, Any]) -> Llama3Rope:
    """Reads the scaling of Llama 3.1.  Raises UnsupportedDrafterError."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [rotary.get(name) for name in names]
    numbers = [value for value in values if isinstance(value, int | float) and value > 0]
    _raise_obstacles({"its llama3 scaling lacks a number above 0": len(numbers) != len(names)})
    factor, low, high, original = numbers
    _raise_obstacles({"its llama3 scaling has no frequencies between low and high": low >= high})
    return Llama3Rope(factor, low, high, int(original))


def _scaling(rotary: Mapping[str, Any]) -> str | None:
    """Names the scaling of rotary positions; None if there is no scaling."""
    if "mrope_section" in rotary:
        # SGLang renames the type to "default" after it has read the config.
        return "mrope"
    kind = rotary.get("rope_type") or rotary.get("type")
    if kind not in (None, "default"):
        return str(kind)
    unknown = sorted(rotary.keys() - _ROTARY_KEYS)
    return f"{', '.join(unknown)} of an unknown type" if unknown else None


def _unfollowed_obstacle(fields: list[str]) -> dict[str, bool]:
    """Returns one obstacle for the fields that `unknown_fields` has returned."""
    return {f"its config sets what a student does not follow: {', '.join(fields)}": bool(fields)}


def _require_decoder(obstacles: Mapping[str, bool], config: Mapping[str, Any]) -> DecoderShape:
    """Returns the sizes of the layers.  Raises UnsupportedDrafterError with all obstacles."""
    try:
        decoder = decoder_shape(config)
    except UnsupportedDrafterError as error:
        _raise_obstacles({**obstacles, str(error): True})
        raise
    _raise_obstacles(obstacles)
    return decoder


def _raise_obstacles(obstacles: Mapping[str, bool]) -> None:
    """Raises UnsupportedDrafterError with all obstacles that apply, if any."""
    if reasons := [reason for reason, applies in obstacles.items() if applies]:
        raise UnsupportedDrafterError("; ".join(reasons))
