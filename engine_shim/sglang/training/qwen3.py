"""The lab's targets: Qwen3 and Qwen2 with tied embeddings, and how one is grown deeper."""

from __future__ import annotations

import torch

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.language_model import (
    QWEN2,
    QWEN3,
    DecoderLayer,
    Family,
    LanguageModel,
)


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
