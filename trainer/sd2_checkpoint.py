"""Folders of SD2 drafters, in the layout that SGLang loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from engine_shim.sglang.training.blocks import Llama3Rope, Rotary
from engine_shim.sglang.training.configs import UnsupportedDrafterError
from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS
from engine_shim.sglang.training.sd2 import STEERED, Sd2Draft, Sd2Shape
from trainer.checkpoint import save_model
from trainer.fused import split
from trainer.language_checkpoint import (
    ModelFolderError,
    language_shape,
    put_state,
    read_config,
    read_state,
)

_DECODER: Final = "decoder."
# Fields of Llama3Rope, and their names in a config.
_ROPE_KEYS: Final = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def save_sd2(draft: Sd2Draft, folder: Path) -> None:
    """Writes ``draft`` as a checkpoint that `engine_shim.sglang.drafters.sd2_model` serves."""
    shape = draft.shape
    (architecture,) = [name for name, family in STEERED.items() if family == shape.family]
    parts = split(draft.state_dict(), shape.decoder)
    save_model(
        folder,
        shape.decoder,
        {_stored_name(name): part for name, part in parts},
        architecture,
        model_type=shape.family.model_type,
        tie_word_embeddings=shape.tied,
        target_hidden_size=shape.target_hidden,
        eagle_config={EAGLE_LAYERS: list(shape.feature_layers)},
        **_rope_fields(shape.decoder.rope),
    )


def load_sd2(folder: Path) -> Sd2Draft:
    """Reads back :func:`save_sd2`, in float32.  Raises ModelFolderError."""
    config = read_config(folder)
    try:
        shape = sd2_shape(config)
    except ValueError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    with torch.device("meta"):
        draft = Sd2Draft(shape)
    state = read_state(folder)
    put_state(draft, {_live_name(name): part for name, part in state.items()}, folder)
    draft.decoder.rotary = Rotary(shape.decoder)
    return draft.eval()


def sd2_shape(config: Mapping[str, Any]) -> Sd2Shape:
    """Takes the sizes of an SD2 drafter.  Raises ValueError.

    A config without ``target_hidden_size`` has the drafter's own width.
    """
    decoder, family, tied = language_shape(config, STEERED)
    layers = (config.get("eagle_config") or {}).get(EAGLE_LAYERS)
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise UnsupportedDrafterError(f"its eagle_config names no {EAGLE_LAYERS}")
    width = config.get("target_hidden_size") or decoder.hidden
    return Sd2Shape(decoder, width, tuple(layers), family, tied)


def _rope_fields(rope: Llama3Rope | None) -> dict[str, Any]:
    if rope is None:
        return {}
    numbers = {_ROPE_KEYS[field]: value for field, value in asdict(rope).items()}
    return {"rope_scaling": {"rope_type": "llama3", **numbers}}


def _stored_name(live: str) -> str:
    layer = re.fullmatch(r"steer\.(\d+)\.weight", live)
    return f"model.layers.{layer[1]}.mlp.steer.weight" if layer else live.removeprefix(_DECODER)


def _live_name(stored: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.steer\.weight", stored)
    if layer:
        return f"steer.{layer[1]}.weight"
    return stored if stored == "mix.weight" else _DECODER + stored
