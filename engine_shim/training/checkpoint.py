"""Model folders that SGLang and transformers load: a config and bfloat16 safetensors.

A live model keeps fused matrices, a checkpoint keeps their parts; the names differ for the draft's
one layer, which published EAGLE3 checkpoints call ``midlayer``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_shim.training.blocks import DecoderShape
from engine_shim.training.dflash import DFlashShape, DFlashStudent
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.mtp import MtpShape
from engine_shim.training.qwen3 import Qwen3Target
from engine_shim.training.sd2 import SD2_ARCHITECTURE, Sd2Draft, Sd2Shape

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_LIVE_LAYER: Final = "model.layers.0."
_DRAFT_LAYER: Final = "midlayer."
_DECODER: Final = "decoder."
# Fields of DecoderShape, and their names in a config.
_CONFIG_KEYS: Final = {
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
_EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
_VOCABULARY_MAPS: Final = ("d2t", "t2d")


def save_target(target: Qwen3Target, folder: Path) -> None:
    """Writes ``target`` as a ``Qwen3ForCausalLM`` checkpoint."""
    parts = dict(_split(target.state_dict(), target.shape))
    _save(folder, target.shape, parts, "Qwen3ForCausalLM", tie_word_embeddings=True)


def load_target(folder: Path) -> Qwen3Target:
    """Reads back :func:`save_target`, in float32 and ready for inference."""
    config, parts = _read(folder)
    target = Qwen3Target(_shape(config))
    target.load_state_dict(parts)
    return target.eval()


def save_draft(student: Eagle3Student, folder: Path) -> None:
    """Writes ``student`` as a ``LlamaForCausalLMEagle3`` checkpoint."""
    shape = student.shape
    parts = {_draft_name(name): part for name, part in _split(student.state_dict(), shape.decoder)}
    # SGLang reads d2t as (target id - draft id): zeros say that draft ids are target ids.
    parts["d2t"] = torch.zeros(shape.decoder.vocabulary, dtype=torch.int64)
    parts["t2d"] = torch.ones(shape.decoder.vocabulary, dtype=torch.bool)
    _save(
        folder,
        shape.decoder,
        parts,
        "LlamaForCausalLMEagle3",
        model_type="llama",
        draft_vocab_size=shape.decoder.vocabulary,
        eagle_config={_EAGLE_LAYERS: list(shape.feature_layers)},
    )


def load_draft(folder: Path, embedding: Tensor) -> Eagle3Student:
    """Reads back :func:`save_draft`, in float32, beside the target's ``embedding``."""
    config, parts = _read(folder)
    feature_layers = tuple(config["eagle_config"][_EAGLE_LAYERS])
    student = Eagle3Student(Eagle3Shape(_shape(config), feature_layers), embedding.float())
    student.load_state_dict(
        {_live_name(name): part for name, part in parts.items() if name not in _VOCABULARY_MAPS}
    )
    return student.eval()


def eagle3_shape(config: Mapping[str, Any], feature_layers: int) -> Eagle3Shape:
    """Takes a student's sizes from a drafter's config.

    feature_layers: how many target layers it reads; a config that does not say which has 0, 1, ...
    """
    named = (config.get("eagle_config") or {}).get(_EAGLE_LAYERS)
    return Eagle3Shape(_live_shape(config), _layers(named, feature_layers))


def dflash_shape(
    config: Mapping[str, Any], feature_layers: int, block: int, mask_token: int
) -> DFlashShape:
    """Takes a student's sizes from a drafter's config and from the engine that serves it."""
    named = (config.get("dflash_config") or {}).get("target_layer_ids")
    return DFlashShape(_live_shape(config), _layers(named, feature_layers), block, mask_token)


def mtp_shape(config: Mapping[str, Any]) -> MtpShape:
    """Takes a predictor's sizes from its target's config."""
    return MtpShape(_live_shape({**config, "num_hidden_layers": 1}))


def _layers(named: Sequence[int] | None, count: int) -> tuple[int, ...]:
    return tuple(named) if named is not None and len(named) == count else tuple(range(count))


def _live_shape(config: Mapping[str, Any]) -> DecoderShape:
    rotary = config.get("rope_parameters") or {}
    base = config.get("rope_theta") or rotary.get("rope_theta")
    return _shape({**config, "rope_theta": base})


def save_dflash(student: DFlashStudent, folder: Path, target_layers: int | None = None) -> None:
    """Writes ``student`` as a ``DFlashDraftModel`` checkpoint.

    target_layers: how many the target has, which SpecForge wants to know.
    """
    shape = student.shape
    draft = {"target_layer_ids": list(shape.feature_layers), "mask_token_id": shape.mask_token}
    _save(
        folder,
        shape.decoder,
        dict(_split(student.state_dict(), shape.decoder)),
        "DFlashDraftModel",
        layer_types=["full_attention"] * shape.decoder.layers,
        block_size=shape.block,
        dflash_config=draft,
        **({} if target_layers is None else {"num_target_layers": target_layers}),
    )


def load_dflash(folder: Path, embedding: Tensor, head: Tensor | None = None) -> DFlashStudent:
    """Reads back :func:`save_dflash`, in float32, for the target's ``embedding`` and ``head``."""
    config, parts = _read(folder)
    draft = config["dflash_config"]
    shape = DFlashShape(
        _shape(config),
        tuple(draft["target_layer_ids"]),
        config["block_size"],
        draft["mask_token_id"],
    )
    student = DFlashStudent(shape, embedding.float(), head)
    student.load_state_dict(parts)
    return student.eval()


def save_sd2(draft: Sd2Draft, folder: Path) -> None:
    """Writes ``draft`` as a checkpoint that `engine_shim.sglang.drafters.sd2_model` serves."""
    shape = draft.shape
    parts = _split(draft.state_dict(), shape.decoder)
    _save(
        folder,
        shape.decoder,
        {_sd2_stored_name(name): part for name, part in parts},
        SD2_ARCHITECTURE,
        tie_word_embeddings=True,
        eagle_config={_EAGLE_LAYERS: list(shape.feature_layers)},
    )


def load_sd2(folder: Path) -> Sd2Draft:
    """Reads back :func:`save_sd2`, in float32."""
    config, parts = _read(folder)
    layers = tuple(config["eagle_config"][_EAGLE_LAYERS])
    draft = Sd2Draft(Sd2Shape(_shape(config), config["hidden_size"], layers))
    draft.load_state_dict({_sd2_live_name(name): part for name, part in parts.items()})
    return draft.eval()


def _sd2_stored_name(live: str) -> str:
    layer = re.fullmatch(r"steer\.(\d+)\.weight", live)
    return f"model.layers.{layer[1]}.mlp.steer.weight" if layer else live.removeprefix(_DECODER)


def _sd2_live_name(stored: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.steer\.weight", stored)
    if layer:
        return f"steer.{layer[1]}.weight"
    return stored if stored == "mix.weight" else _DECODER + stored


def _split(state: Mapping[str, Tensor], shape: DecoderShape) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if "qkv_proj" in name:
            sizes = [shape.query_width, shape.kv_width, shape.kv_width]
            for part, rows in zip(
                ("q_proj", "k_proj", "v_proj"), torch.split(tensor, sizes), strict=True
            ):
                yield name.replace("qkv_proj", part), rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield name.replace("gate_up_proj", part), rows
        else:
            yield name, tensor


def _join(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {}
    for name, part in parts.items():
        if "q_proj" in name:
            group = [
                parts[name.replace("q_proj", piece)] for piece in ("q_proj", "k_proj", "v_proj")
            ]
            state[name.replace("q_proj", "qkv_proj")] = torch.cat(group)
        elif "gate_proj" in name:
            state[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [part, parts[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(piece in name for piece in ("k_proj", "v_proj", "up_proj")):
            state[name] = part
    return {name: tensor.float() for name, tensor in state.items()}


def _draft_name(live: str) -> str:
    return live.replace(_LIVE_LAYER, _DRAFT_LAYER).removeprefix("model.")


def _live_name(stored: str) -> str:
    if stored.startswith(_DRAFT_LAYER):
        return stored.replace(_DRAFT_LAYER, _LIVE_LAYER)
    return stored if stored.startswith("lm_head") else f"model.{stored}"


def _shape(config: Mapping[str, Any]) -> DecoderShape:
    return DecoderShape(**{field: config[key] for field, key in _CONFIG_KEYS.items()})


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads a checkpoint's config, and its weights with fused matrices in float32."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    return config, _join(load_file(folder / _WEIGHTS))


def _save(
    folder: Path, shape: DecoderShape, parts: Mapping[str, Tensor], architecture: str, **more: Any
) -> None:
    """Writes a checkpoint; more: what its config has beside the sizes of the decoder."""
    config = {
        **{key: getattr(shape, field) for field, key in _CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "architectures": [architecture],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {}
    for name, part in parts.items():
        dtype = torch.bfloat16 if part.is_floating_point() else part.dtype
        stored[name] = part.detach().to(dtype, copy=True).contiguous()
    weights = folder / _WEIGHTS
    save_file(stored, weights, metadata={"format": "pt"})
    # safetensors writes for the owner only; an engine often runs as another user.
    weights.chmod(0o644)
