"""Model folders that SGLang and transformers load: a config and bfloat16 safetensors.

A live model keeps fused matrices, a checkpoint keeps their parts; the names differ for the draft's
one layer, which published EAGLE3 checkpoints call ``midlayer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.configs import (
    DECODER_KEYS,
    decoder_shape,
    dflash_shape,
    draft_tokens,
    eagle3_shape,
    mtp_shape,
)
from engine_shim.sglang.training.dflash import DFlashStudent
from engine_shim.sglang.training.drafter_config import DFLASH, EAGLE3, EAGLE_LAYERS
from engine_shim.sglang.training.eagle3 import Eagle3Student
from engine_shim.sglang.training.language_model import QWEN2
from engine_shim.sglang.training.mtp import MtpStudent
from engine_shim.sglang.training.qwen3 import Qwen2Target, Qwen3Target
from trainer.fused import join, split

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model.safetensors"
_PREDICTOR: Final = "mtp.safetensors"
_PREDICTOR_LAYER: Final = "model.mtp_layers.0."
_MIMO: Final = "MiMoForCausalLM"
_LIVE_LAYER: Final = "model.layers.0."
_DRAFT_LAYER: Final = "midlayer."
# What an EAGLE3 checkpoint holds beside the parameters of its student.
_NOT_LEARNT: Final = ("d2t", "t2d", "embed_tokens.weight")


def save_target(target: Qwen3Target, folder: Path) -> None:
    """Writes ``target`` as a ``Qwen3ForCausalLM`` or ``MiMoForCausalLM`` checkpoint.

    A MiMo's predictor comes from :func:`save_predictor`.
    """
    parts = dict(split(target.state_dict(), target.shape))
    of_mimo: dict[str, Any] = {}
    if target.family is QWEN2:
        of_mimo = {"model_type": "qwen2", "attention_bias": True, "num_nextn_predict_layers": 1}
    architecture = _MIMO if target.family is QWEN2 else "Qwen3ForCausalLM"
    save_model(folder, target.shape, parts, architecture, tie_word_embeddings=True, **of_mimo)


def load_target(folder: Path) -> Qwen3Target:
    """Reads back :func:`save_target`, in float32 and ready for inference."""
    config, parts = _read(folder)
    kind = Qwen2Target if _MIMO in config["architectures"] else Qwen3Target
    target = kind(decoder_shape(config))
    target.load_state_dict(parts)
    return target.eval()


def save_predictor(student: MtpStudent, folder: Path) -> None:
    """Adds the predictor of a MiMo to the folder of its target."""
    parts = split(student.state_dict(), student.shape.decoder)
    _save_weights(folder / _PREDICTOR, {_predictor_name(name): part for name, part in parts})


def load_predictor(folder: Path, embedding: Tensor) -> MtpStudent:
    """Reads back :func:`save_predictor`, in float32, beside the target's ``embedding``."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    student = MtpStudent(mtp_shape(config), embedding.float())
    stored = join(load_file(folder / _PREDICTOR))
    student.load_state_dict({_live_predictor_name(name): part for name, part in stored.items()})
    return student.eval()


def _predictor_name(live: str) -> str:
    return _PREDICTOR_LAYER + live.removeprefix("model.").removeprefix("mtp_block.")


def _live_predictor_name(stored: str) -> str:
    name = stored.removeprefix(_PREDICTOR_LAYER)
    beside = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return f"model.{name}" if name.startswith(beside) else f"model.mtp_block.{name}"


def save_draft(student: Eagle3Student, folder: Path) -> None:
    """Writes ``student`` as a ``LlamaForCausalLMEagle3`` checkpoint, as its config was."""
    shape = student.shape
    vocabulary = shape.decoder.vocabulary
    parts = {_draft_name(name): part for name, part in split(student.state_dict(), shape.decoder)}
    if shape.own_head:
        own = torch.arange(vocabulary) if student.tokens is None else student.tokens
        # SGLang reads d2t as (target id - draft id): zeros say that draft ids are target ids.
        parts["d2t"] = own - torch.arange(len(own), device=own.device)
        parts["t2d"] = torch.isin(torch.arange(vocabulary), own.cpu())
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
        draft_vocab_size=shape.drafts if shape.own_head else None,
        **({"eagle_config": layers} if layers else {}),
        **norms,
    )


def load_draft(folder: Path, embedding: Tensor, head: Tensor | None = None) -> Eagle3Student:
    """Reads an EAGLE3 draft, in float32, beside the target's ``embedding`` and ``head``.

    The embedding of a checkpoint is passed over, as SGLang does.  Raises UnsupportedDrafterError
    for one that has no student.
    """
    config, parts = _read(folder)
    shape = eagle3_shape(config)
    offsets = parts.get("d2t")
    # SGLang's hot_token_id.
    hot = None if offsets is None else offsets + torch.arange(len(offsets))
    student = Eagle3Student(shape, embedding.float(), head, draft_tokens(hot, shape))
    student.load_state_dict(
        {_live_name(name): part for name, part in parts.items() if name not in _NOT_LEARNT}
    )
    return student.eval()


def save_dflash(student: DFlashStudent, folder: Path, target_layers: int | None = None) -> None:
    """Writes ``student`` as a ``DFlashDraftModel`` checkpoint.

    target_layers: how many the target has, which SpecForge wants to know.
    """
    shape = student.shape
    draft = {"target_layer_ids": list(shape.feature_layers), "mask_token_id": shape.mask_token}
    save_model(
        folder,
        shape.decoder,
        dict(split(student.state_dict(), shape.decoder)),
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

    unnamed_layers: as in `dflash_shape`.  Raises UnsupportedDrafterError for one that has no
    student.
    """
    config, parts = _read(folder)
    shape = dflash_shape(config, unnamed_layers=unnamed_layers)
    student = DFlashStudent(shape, embedding.float(), head)
    student.load_state_dict(parts)
    return student.eval()


def _draft_name(live: str) -> str:
    return live.replace(_LIVE_LAYER, _DRAFT_LAYER).removeprefix("model.")


def _live_name(stored: str) -> str:
    if stored.startswith(_DRAFT_LAYER):
        return stored.replace(_DRAFT_LAYER, _LIVE_LAYER)
    return stored if stored.startswith("lm_head") else f"model.{stored}"


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads a checkpoint's config, and its weights with fused matrices in float32."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    return config, join(load_file(folder / _WEIGHTS))


def save_model(
    folder: Path, shape: DecoderShape, parts: Mapping[str, Tensor], architecture: str, **more: Any
) -> None:
    """Writes a checkpoint; more: what its config has beside the sizes of the decoder."""
    config = {
        **{key: getattr(shape, field) for field, key in DECODER_KEYS.items()},
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
    _save_weights(folder / _WEIGHTS, parts)


def _save_weights(file: Path, parts: Mapping[str, Tensor]) -> None:
    stored = {}
    for name, part in parts.items():
        dtype = torch.bfloat16 if part.is_floating_point() else part.dtype
        stored[name] = part.detach().to(dtype, copy=True).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    # safetensors writes for the owner only; an engine often runs as another user.
    file.chmod(0o644)
