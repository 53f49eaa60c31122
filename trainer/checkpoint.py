"""Model folders that SGLang and transformers load: a config and bfloat16 safetensors.

A live model has fused matrices, a checkpoint has their parts.  The name of the draft's only layer
also differs: published EAGLE3 checkpoints call it ``midlayer``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_shim.sglang.training import students
from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.dflash import DFlashStudent
from engine_shim.sglang.training.drafter_config import DFLASH, EAGLE3, EAGLE_LAYERS

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"
_LIVE_LAYER: Final = "model.layers.0."
_DRAFT_LAYER: Final = "midlayer."
# Fused matrices of a live model, and the parts that a checkpoint stores.
_FUSED_PARTS: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Tensors of an EAGLE3 checkpoint that are not parameters of its student.
_NON_PARAMETERS: Final = ("d2t", "t2d", "embed_tokens.weight")


def save_eagle3(student: Eagle3Student, folder: Path) -> None:
    """Writes ``student`` as a ``LlamaForCausalLMEagle3`` checkpoint."""
    shape = student.shape
    vocabulary = shape.decoder.vocabulary
    parts = {
        _draft_name(name): part for name, part in split_fused(student.state_dict(), shape.decoder)
    }
    if shape.own_head:
        target_ids = torch.arange(vocabulary) if student.tokens is None else student.tokens
        # SGLang reads d2t as (target id - draft id): zeros say that draft ids are target ids.
        parts["d2t"] = target_ids - torch.arange(len(target_ids), device=target_ids.device)
        parts["t2d"] = torch.isin(torch.arange(vocabulary), target_ids.cpu())
    layers = {EAGLE_LAYERS: list(shape.feature_layers)} if shape.feature_layers else {}
    norms = {
        name: True for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(shape, name)
    }
    save_model(
        folder,
        shape.decoder,
        parts,
        EAGLE3,
        model_type="llama",
        draft_vocab_size=shape.draft_vocabulary_size if shape.own_head else None,
        **({"eagle_config": layers} if layers else {}),
        **norms,
    )


def load_eagle3(folder: Path, embedding: Tensor, head: Tensor | None = None) -> Eagle3Student:
    """Reads an EAGLE3 draft, in float32, beside the target's ``embedding`` and ``head``.

    The embedding in a checkpoint is ignored, as in SGLang.  Raises UnsupportedDrafterError for a
    draft that has no student class.
    """
    config, parts = read_model(folder)
    shape = students.eagle3_shape(config)
    offsets = parts.get("d2t")
    # SGLang's hot_token_id.
    hot_token_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    student = Eagle3Student(
        shape, embedding.float(), head, students.draft_tokens(hot_token_ids, shape)
    )
    student.load_state_dict(
        {_live_name(name): part for name, part in parts.items() if name not in _NON_PARAMETERS}
    )
    return student.eval()


def save_dflash(student: DFlashStudent, folder: Path, target_layers: int | None = None) -> None:
    """Writes ``student`` as a ``DFlashDraftModel`` checkpoint.

    target_layers: number of the target's layers, which SpecForge needs.
    """
    shape = student.shape
    draft = {"target_layer_ids": list(shape.feature_layers), "mask_token_id": shape.mask_token}
    save_model(
        folder,
        shape.decoder,
        dict(split_fused(student.state_dict(), shape.decoder)),
        DFLASH,
        layer_types=["full_attention"] * shape.decoder.layers,
        block_size=shape.block,
        dflash_config=draft,
        **({} if target_layers is None else {"num_target_layers": target_layers}),
    )


def load_dflash(
    folder: Path,
    embedding: Tensor,
    head: Tensor | None = None,
    *,
    unnamed_layers: tuple[int, ...] = (),
) -> DFlashStudent:
    """Reads a DFlash draft, in float32, for the target's ``embedding`` and ``head``.

    unnamed_layers: as in `dflash_shape`.  Raises UnsupportedDrafterError for a draft that has no
    student class.
    """
    config, parts = read_model(folder)
    shape = students.dflash_shape(config, unnamed_layers=unnamed_layers)
    student = DFlashStudent(shape, embedding.float(), head)
    student.load_state_dict(parts)
    return student.eval()


def _draft_name(live: str) -> str:
    return live.replace(_LIVE_LAYER, _DRAFT_LAYER).removeprefix("model.")


def _live_name(stored: str) -> str:
    if stored.startswith(_DRAFT_LAYER):
        return stored.replace(_DRAFT_LAYER, _LIVE_LAYER)
    return stored if stored.startswith("lm_head") else f"model.{stored}"


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads a checkpoint's config, and its weights in float32 with fused matrices."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return config, join_fused(load_file(folder / WEIGHTS))


def save_model(
    folder: Path,
    shape: DecoderShape,
    parts: Mapping[str, Tensor],
    architecture: str,
    **extra_config: Any,
) -> None:
    """Writes a checkpoint; extra_config: fields of its config besides the decoder's sizes."""
    config = {
        **{key: getattr(shape, field) for field, key in students.DECODER_KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "architectures": [architecture],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        **extra_config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    save_weights(folder / WEIGHTS, parts)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_weights(file: Path, parts: Mapping[str, Tensor]) -> None:
    """Writes tensors, floating-point ones in bfloat16."""
    stored = {}
    for name, part in parts.items():
        dtype = torch.bfloat16 if part.is_floating_point() else part.dtype
        stored[name] = part.detach().to(dtype, copy=True).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    # safetensors makes the file readable for the owner only; an engine often runs as another user.
    file.chmod(0o644)


def split_fused(state: Mapping[str, Tensor], shape: DecoderShape) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as a checkpoint stores a live model's state."""
    heads = [shape.query_width, shape.kv_width, shape.kv_width]
    sizes = {"qkv_proj": heads, "gate_up_proj": [shape.mlp, shape.mlp]}
    for name, tensor in state.items():
        fused = next((part for part in _FUSED_PARTS if part in name), None)
        if fused is None:
            yield name, tensor
            continue
        for part, rows in zip(_FUSED_PARTS[fused], tensor.split(sizes[fused]), strict=True):
            yield name.replace(fused, part), rows


def join_fused(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a live model, in float32, from the tensors of a checkpoint.

    Raises KeyError if a part of a fused matrix is missing.
    """
    state = dict(parts)
    for fused, pieces in _FUSED_PARTS.items():
        for name in (name for name in parts if pieces[0] in name):
            tensors = [state.pop(name.replace(pieces[0], piece)) for piece in pieces]
            state[name.replace(pieces[0], fused)] = torch.cat(tensors)
    return {
        name: part.float() if part.is_floating_point() else part for name, part in state.items()
    }
