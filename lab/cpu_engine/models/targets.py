"""The lab's targets: Qwen3, and Qwen2 as MiMo has it, with tied embeddings; files and growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_shim.sglang.training.blocks import QWEN2, QWEN3, DecoderLayer, DecoderShape, Family
from engine_shim.sglang.training.chain import MtpStudent
from engine_shim.sglang.training.students import decoder_shape, mtp_shape
from trainer.checkpoint import CONFIG, join_fused, read_model, save_model, save_weights, split_fused
from trainer.language_model import LanguageModel

_PREDICTOR: Final = "mtp.safetensors"
_PREDICTOR_LAYER: Final = "model.mtp_layers.0."
_MIMO: Final = "MiMoForCausalLM"


class Qwen3Target(LanguageModel):
    """A target with tied input and output embeddings."""

    layers_of: Family = QWEN3

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, self.layers_of)


class Qwen2Target(Qwen3Target):
    """A target with Qwen2's layers, such as MiMo's."""

    layers_of = QWEN2


def grow(target: Qwen3Target, layers: int) -> Qwen3Target:
    """Makes a deeper target that computes nearly the same function with every layer at work.

    A layer adds a step to the residual stream; one step of it becomes ``n`` layers that add an
    ``n``-th each, as in integrating an ODE with a finer mesh.  The first layer stays whole: it
    writes many times what the bare embedding holds, so its parts would read something it never
    saw.  Layers that repeat with zero output instead would keep the function exactly, and mostly
    keep doing nothing however long they are trained.

    Raises:
        ValueError: ``layers`` is less than the present depth, or there is nothing after the first
            layer to split.
    """
    depth = target.shape.layers
    if layers < depth or depth < 2:
        raise ValueError(
            f"cannot grow {depth} layers to {layers}: start from two or more, and end with no fewer"
        )
    copies_per_layer, extra = divmod(layers - 1, depth - 1)
    parts = [1] + [copies_per_layer + (index < extra) for index in range(depth - 1)]
    sources = [source for source, count in enumerate(parts) for _ in range(count)]

    grown = type(target)(target.shape.replace_layers(layers))
    grown.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, source in zip(grown.model.layers, sources, strict=True):
        assert isinstance(layer, DecoderLayer)
        layer.load_state_dict(target.model.layers[source].state_dict())
        with torch.no_grad():
            layer.self_attn.o_proj.weight.div_(parts[source])
            layer.mlp.down_proj.weight.div_(parts[source])
    return grown


def save_target(target: Qwen3Target, folder: Path) -> None:
    """Writes ``target`` as a ``Qwen3ForCausalLM`` or ``MiMoForCausalLM`` checkpoint.

    A MiMo's predictor comes from :func:`save_predictor`.
    """
    parts = dict(split_fused(target.state_dict(), target.shape))
    mimo_fields: dict[str, Any] = {}
    if target.family is QWEN2:
        mimo_fields = {"model_type": "qwen2", "attention_bias": True, "num_nextn_predict_layers": 1}
    architecture = _MIMO if target.family is QWEN2 else "Qwen3ForCausalLM"
    save_model(folder, target.shape, parts, architecture, tie_word_embeddings=True, **mimo_fields)


def load_target(folder: Path) -> Qwen3Target:
    """Reads back :func:`save_target`, in float32 and ready for inference."""
    config, parts = read_model(folder)
    kind = Qwen2Target if _MIMO in config["architectures"] else Qwen3Target
    target = kind(decoder_shape(config))
    target.load_state_dict(parts)
    return target.eval()


def save_predictor(student: MtpStudent, folder: Path) -> None:
    """Adds the predictor of a MiMo to the folder of its target."""
    parts = split_fused(student.state_dict(), student.shape.decoder)
    save_weights(folder / _PREDICTOR, {_predictor_name(name): part for name, part in parts})


def load_predictor(folder: Path, embedding: Tensor) -> MtpStudent:
    """Reads back :func:`save_predictor`, in float32, beside the target's ``embedding``."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    student = MtpStudent(mtp_shape(config), embedding.float())
    stored_weights = join_fused(load_file(folder / _PREDICTOR))
    student.load_state_dict(
        {_live_predictor_name(name): part for name, part in stored_weights.items()}
    )
    return student.eval()


def _predictor_name(live: str) -> str:
    return _PREDICTOR_LAYER + live.removeprefix("model.").removeprefix("mtp_block.")


def _live_predictor_name(stored_name: str) -> str:
    name = stored_name.removeprefix(_PREDICTOR_LAYER)
    outer_prefixes = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return f"model.{name}" if name.startswith(outer_prefixes) else f"model.mtp_block.{name}"
