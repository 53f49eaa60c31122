"""Language models in plain torch: targets, and the drafters that are models of their own.

Architectures: Llama 3 (arXiv:2407.21783), Qwen2 technical report (arXiv:2407.10671) and Qwen3
technical report (arXiv:2505.09388); numerically the same as transformers' ``LlamaForCausalLM``,
``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.sglang.training.blocks import (
    DecoderShape,
    PreNormLayer,
    RmsNorm,
    Rotary,
    initialise,
)


@dataclass(frozen=True)
class Family:
    """Says what the layers of one family of models have that others do not.

    architecture, model_type: as checkpoints name them.  norm_heads: whether queries and keys are
    normed.  bias: whether queries, keys and values have one.
    """

    architecture: str
    model_type: str
    norm_heads: bool = False
    bias: bool = False


LLAMA: Final = Family("LlamaForCausalLM", "llama")
QWEN2: Final = Family("Qwen2ForCausalLM", "qwen2", bias=True)
QWEN3: Final = Family("Qwen3ForCausalLM", "qwen3", norm_heads=True)
FAMILIES: Final = (LLAMA, QWEN2, QWEN3)


class DecoderLayer(PreNormLayer):
    """A layer of one of the families."""

    def __init__(self, shape: DecoderShape, family: Family = QWEN3) -> None:
        super().__init__(shape, norm_heads=family.norm_heads, bias=family.bias)

    def forward(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], mlp_bias: Tensor | None = None
    ) -> Tensor:
        """Maps the residual stream [batch, length, hidden] to the next layer's."""
        heads = self.self_attn.project(self.input_layernorm(residual), rotation)
        # Rotation and norms leave autocast's bfloat16, the values do not: attention wants one type.
        q, k, v = (head.transpose(1, 2).to(heads[2].dtype) for head in heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(residual, attended.transpose(1, 2).flatten(2), mlp_bias)


class Decoder(nn.Module):
    """Embedding, layers and final norm, which a checkpoint calls ``model``."""

    def __init__(self, shape: DecoderShape, family: Family) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape, family) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class LanguageModel(nn.Module):
    """A decoder of one of the families with its head.

    tied: whether the embedding is the head.
    """

    def __init__(self, shape: DecoderShape, family: Family, *, tied: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.family = family
        self.model = Decoder(shape, family)
        self.lm_head = None if tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.rotary = Rotary(shape)
        initialise(self)
        # The residual stream sums 2 * layers branches: scaled so that its variance does not grow
        # with depth.
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
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
        """Returns what the head reads, [batch, length, hidden], and the features."""
        rotation = self.rotary.at(torch.arange(tokens.shape[1], device=tokens.device))
        residual = self.model.embed_tokens(tokens)
        features = []
        for index, layer in enumerate(self.model.layers):
            residual = layer(residual, rotation)
            if index in feature_layers:
                features.append(residual)
        return self.model.norm(residual), features
