"""Reads language models of others: folders with a config and safetensors, one file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine_shim.sglang.training.blocks import DecoderShape, Rotary
from engine_shim.sglang.training.language_model import FAMILIES, QWEN2, QWEN3, Family, LanguageModel
from engine_shim.sglang.training.students import UnsupportedDrafterError, decoder_shape
from trainer.checkpoint import join

CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MOST_LAYERS: Final = 1000
_SIZES: Final = (
    "hidden", "heads", "kv_heads", "head_dim", "mlp", "layers", "vocabulary", "max_positions",
)  # fmt: skip


class ModelFolderError(ValueError):
    """A model folder that cannot be read, or whose model has no equal here; the message says it."""


class LanguageShape(NamedTuple):
    """Holds what a config says.  tied: whether the embedding is the head."""

    decoder: DecoderShape
    family: Family
    tied: bool


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config of a folder.  Raises ModelFolderError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder} has no {CONFIG} that can be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{folder / CONFIG} is not an object")
    return config


def language_shape(config: Mapping[str, Any], families: Mapping[str, Family]) -> LanguageShape:
    """Takes the sizes of a model.  Raises UnsupportedDrafterError.

    families: by the architecture that is named in the config.
    """
    named = config.get("architectures") or ["nothing"]
    family = families.get(str(named[0]))
    if family is None:
        known = ", ".join(families)
        raise UnsupportedDrafterError(f"its architecture is {named[0]}; it can be {known}")
    kinds = set(config.get("layer_types") or ())
    obstacles = {
        "its weights are quantised": config.get("quantization_config"),
        "its MLPs have biases": config.get("mlp_bias"),
        "its projections have biases": family is not QWEN2 and config.get("attention_bias"),
        "its layers do not see the whole context": config.get("use_sliding_window")
        or kinds - {"full_attention"},
    }
    for reason, is_so in obstacles.items():
        if is_so:
            raise UnsupportedDrafterError(reason)
    # What transformers takes where a Qwen3 does not say.
    default = {"head_dim": 128} if family is QWEN3 else {}
    decoder = decoder_shape({**default, **config}, may_stretch=True)
    _require_sizes(decoder)
    return LanguageShape(decoder, family, bool(config.get("tie_word_embeddings", False)))


def _require_sizes(shape: DecoderShape) -> None:
    for name in _SIZES:
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedDrafterError(f"its config has {value!r} as {name}")
    if shape.heads % shape.kv_heads or shape.head_dim % 2 or shape.layers > _MOST_LAYERS:
        raise UnsupportedDrafterError(
            f"{shape.heads} heads, {shape.kv_heads} of them with keys, {shape.head_dim} wide in "
            f"{shape.layers} layers are no decoder"
        )


def load_language_model(folder: Path) -> LanguageModel:
    """Reads a Llama, Qwen2 or Qwen3, in float32 and ready for inference.

    Raises ModelFolderError.
    """
    config = read_config(folder)
    try:
        shape = language_shape(config, {family.architecture: family for family in FAMILIES})
    except UnsupportedDrafterError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    with torch.device("meta"):
        model = LanguageModel(shape.decoder, shape.family, tied=shape.tied)
    state = read_state(folder)
    if shape.tied:
        state.pop("lm_head.weight", None)
    put_state(model, state, folder)
    model.rotary = Rotary(shape.decoder)
    return model.eval()


def read_state(folder: Path) -> dict[str, Tensor]:
    """Reads weights as a live model names them, in float32.  Raises ModelFolderError."""
    parts: dict[str, Tensor] = {}
    try:
        for name in _files(folder):
            parts.update(load_file(folder / name))
        return join({name: part for name, part in parts.items() if "rotary_emb" not in name})
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"the weights of {folder} cannot be read: {error}") from error
    except (KeyError, RuntimeError) as error:
        raise ModelFolderError(f"the weights of {folder} do not fit together: {error}") from error


def put_state(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Gives a model made on "meta" its weights.  Raises ModelFolderError where they do not fit."""
    for name, part in state.items():
        if not bool(torch.isfinite(part).all()):
            raise ModelFolderError(f"{folder}: {name} contains NaN or infinite values")
    try:
        model.load_state_dict(dict(state), assign=True)
    except RuntimeError as error:
        raise ModelFolderError(f"{folder} does not hold what its config says: {error}") from error


def _files(folder: Path) -> list[str]:
    """Names the files with the weights."""
    index = folder / _INDEX
    if not index.exists():
        return [_WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{index} is not an index of weights") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFolderError(f"{index} names {name!r}, which is not a file of its folder")
    return sorted(names)
