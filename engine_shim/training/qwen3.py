"""Qwen decoders in plain torch, to train a target and read the features drafts need.

Architectures: Qwen3 technical report (arXiv:2505.09388) and Qwen2 technical report
(arXiv:2407.10671); numerically the same as ``transformers.Qwen3ForCausalLM`` and
``Qwen2ForCausalLM``.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.training.blocks import DecoderShape, PreNormLayer, RmsNorm, Rotary, initialise


class DecoderLayer(PreNormLayer):
    """A layer of a Qwen3, which norms queries and keys, or of a Qwen2, which adds biases."""

    def __init__(self, shape: DecoderShape, *, qwen2: bool = False) -> None:
        super().__init__(shape, norm_heads=not qwen2, bias=qwen2)

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

    def __init__(self, shape: DecoderShape, *, qwen2: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape, qwen2=qwen2) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class Qwen3Target(nn.Module):
    """The target model with tied input and output embeddings."""

    qwen2 = False

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, qwen2=self.qwen2)
        self.rotary = Rotary(shape)
        initialise(self)
        # The residual stream sums 2 * layers branches: scaled so that its variance does not grow
        # with depth.
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * shape.layers))

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
        return functional.linear(hidden, self.model.embed_tokens.weight), features

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


class Qwen2Target(Qwen3Target):
    """A target with Qwen2's layers, such as MiMo's."""

    qwen2 = True


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
    each, extra = divmod(layers - 1, depth - 1)
    parts = [1] + [each + (index < extra) for index in range(depth - 1)]
    sources = [source for source, count in enumerate(parts) for _ in range(count)]

    grown = type(target)(target.shape.with_layers(layers))
    grown.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, source in zip(grown.model.layers, sources, strict=True):
        assert isinstance(layer, DecoderLayer)
        layer.load_state_dict(target.model.layers[source].state_dict())
        with torch.no_grad():
            layer.self_attn.o_proj.weight.div_(parts[source])
            layer.mlp.down_proj.weight.div_(parts[source])
    return grown
