"""Language models in plain torch: targets, and drafters that are separate models.

Architectures: Llama 3 (arXiv:2407.21783), Qwen2 technical report (arXiv:2407.10671) and Qwen3
technical report (arXiv:2505.09388); numerically the same as transformers' ``LlamaForCausalLM``,
``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``.  Published ones are read from folders with a config
and safetensors, one file or several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.sglang.training import blocks
from engine_shim.sglang.training.students import UnsupportedDrafterError, decoder_shape
from trainer.checkpoint import CONFIG, INDEX, WEIGHTS, join_fused

_MAX_LAYERS: Final = 1000
_SIZE_FIELDS: Final = (
    "hidden", "heads", "kv_heads", "head_dim", "mlp", "layers", "vocabulary", "max_positions",
)  # fmt: skip


class Decoder(nn.Module):
    """Embedding, layers and final norm, which a checkpoint calls ``model``."""

    def __init__(self, shape: blocks.DecoderShape, family: blocks.Family) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(blocks.DecoderLayer(shape, family) for _ in range(shape.layers))
        self.norm = blocks.RmsNorm(shape.hidden, shape.norm_epsilon)


class LanguageModel(nn.Module):
    """A decoder of one of the families with its head.

    tied: whether the embedding is the head.
    """

    def __init__(
        self, shape: blocks.DecoderShape, family: blocks.Family, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.shape = shape
        self.family = family
        self.model = Decoder(shape, family)
        self.lm_head = None if tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.rotary = blocks.Rotary(shape)
        blocks.initialise(self)
        # The residual stream sums 2 * layers branches; scaling keeps its variance independent of
        # the depth.
        for layer in self.model.layers:
            assert isinstance(layer, blocks.DecoderLayer)
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * shape.layers))

    @property
    def head(self) -> Tensor:
        """Returns the weight of the head, [vocabulary, hidden]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [batch, length] to next-token logits [batch, length, vocabulary]."""
        return self.logits_and_features(tokens, ())[0]

    def logits_and_features(
        self, tokens: Tensor, feature_layers: Collection[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns logits, and the residual stream after each layer in ``feature_layers``.

        Features come in ascending order of layer, each [batch, length, hidden].  Layer ``k`` means
        the *output* of layer ``k``, counted from zero, which is how SGLang reads
        ``eagle_aux_hidden_state_layer_ids``.
        """
        hidden, features = self.hidden_and_features(tokens, feature_layers)
        return functional.linear(hidden, self.head), features

    def hidden_and_features(
        self, tokens: Tensor, feature_layers: Collection[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the head's input, [batch, length, hidden], and the features."""
        rotation = self.rotary.compute_rotation(torch.arange(tokens.shape[1], device=tokens.device))
        residual = self.model.embed_tokens(tokens)
        features = []
        for index, layer in enumerate(self.model.layers):
            residual = layer(residual, rotation)
            if index in feature_layers:
                features.append(residual)
        return self.model.norm(residual), features


class ModelFolderError(ValueError):
    """A model folder that cannot be read, or has an unsupported model; the message says why."""


class LanguageShape(NamedTuple):
    """The sizes in a config.  tied: whether the embedding is the head."""

    decoder: blocks.DecoderShape
    family: blocks.Family
    tied: bool


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config of a folder.  Raises ModelFolderError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder} has no readable {CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{folder / CONFIG} is not an object")
    return config


def language_shape(
    config: Mapping[str, Any], families: Mapping[str, blocks.Family]
) -> LanguageShape:
    """Reads the sizes of a model from its config.  Raises UnsupportedDrafterError.

    families: by the architecture in the config.
    """
    architectures = config.get("architectures") or ["nothing"]
    family = families.get(str(architectures[0]))
    if family is None:
        known_names = ", ".join(families)
        raise UnsupportedDrafterError(
            f"its architecture is {architectures[0]}; it can be {known_names}"
        )
    kinds = set(config.get("layer_types") or ())
    obstacles = {
        "its weights are quantised": config.get("quantization_config"),
        "its MLPs have biases": config.get("mlp_bias"),
        "its projections have biases": family is not blocks.QWEN2 and config.get("attention_bias"),
        "its layers do not see the whole context": config.get("use_sliding_window")
        or kinds - {"full_attention"},
    }
    for reason, applies in obstacles.items():
        if applies:
            raise UnsupportedDrafterError(reason)
    # The default of transformers for a Qwen3 without this field.
    defaults = {"head_dim": 128} if family is blocks.QWEN3 else {}
    decoder = decoder_shape({**defaults, **config}, may_stretch=True)
    _require_sizes(decoder)
    return LanguageShape(decoder, family, bool(config.get("tie_word_embeddings", False)))


def _require_sizes(shape: blocks.DecoderShape) -> None:
    for name in _SIZE_FIELDS:
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedDrafterError(f"its config has {value!r} as {name}")
    if shape.heads % shape.kv_heads or shape.head_dim % 2 or shape.layers > _MAX_LAYERS:
        raise UnsupportedDrafterError(
            f"{shape.heads} heads, {shape.kv_heads} of them with keys, {shape.head_dim} wide in "
            f"{shape.layers} layers are not a valid decoder"
        )


def load_language_model(folder: Path) -> LanguageModel:
    """Reads a Llama, Qwen2 or Qwen3, in float32 and ready for inference.

    Raises ModelFolderError.
    """
    config = read_config(folder)
    try:
        shape = language_shape(config, {family.architecture: family for family in blocks.FAMILIES})
    except UnsupportedDrafterError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    with torch.device("meta"):
        model = LanguageModel(shape.decoder, shape.family, tied=shape.tied)
    state = read_state(folder)
    if shape.tied:
        state.pop("lm_head.weight", None)
    load_state(model, state, folder)
    model.rotary = blocks.Rotary(shape.decoder)
    return model.eval()


def read_state(folder: Path) -> dict[str, Tensor]:
    """Reads weights in float32, under a live model's names.  Raises ModelFolderError."""
    parts: dict[str, Tensor] = {}
    try:
        for name in _weight_files(folder):
            parts.update(load_file(folder / name))
        return join_fused({name: part for name, part in parts.items() if "rotary_emb" not in name})
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"the weights of {folder} cannot be read: {error}") from error
    except (KeyError, RuntimeError) as error:
        raise ModelFolderError(f"the weights of {folder} do not fit together: {error}") from error


def load_state(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Loads weights into a model made on "meta".  Raises ModelFolderError if they do not fit."""
    for name, part in state.items():
        if not bool(torch.isfinite(part).all()):
            raise ModelFolderError(f"{folder}: {name} contains NaN or infinite values")
    try:
        model.load_state_dict(dict(state), assign=True)
    except RuntimeError as error:
        raise ModelFolderError(f"the weights of {folder} do not fit its config: {error}") from error


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{index} is not an index of weights") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFolderError(f"{index} names {name!r}, which is not a file of its folder")
    return sorted(names)
