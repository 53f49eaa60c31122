"""The multi-token predictor of MiMo checkpoints in plain torch, by SGLang's conventions.

Model: MiMo, arXiv:2505.07608.  One Qwen2 layer over ``input_proj`` of the normed hidden state and
the normed embedding of the next token; at a request's first position that embedding is zero.  The
hidden state is the target's last one, after its norm, and then the predictor's own, after
``final_layernorm``.  Embedding and head are the target's and are never trained.

``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from engine_shim.sglang.training.chain import ChainStudent


@dataclass(frozen=True)
class MtpShape:
    """A predictor's sizes: one layer of ``decoder``."""

    decoder: DecoderShape

    def __post_init__(self) -> None:
        if self.decoder.layers != 1:
            raise ValueError(f"a predictor has one layer, not {self.decoder.layers}")


class Predictor(nn.Module):
    """The part that a live predictor calls ``model``; no embedding."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.token_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.hidden_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        # A Qwen2 layer: biases on queries, keys and values.
        self.mtp_block = PreNormLayer(shape, bias=True)
        self.final_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)


class MtpStudent(ChainStudent):
    """A trainable predictor; ``embedding``, ``head`` [vocabulary, hidden] are the target's."""

    def __init__(self, shape: MtpShape, embedding: Tensor, head: Tensor | None = None) -> None:
        super().__init__(embedding, head)
        self.shape = shape
        self.model = Predictor(shape.decoder)
        self.rotary = Rotary(shape.decoder)
        initialise(self)

    def _enter(self, features: Tensor) -> Tensor:
        return features

    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = self.model
        embedded = functional.embedding(consumed, self.embedding)
        embedded = torch.where((positions == 0)[..., None], 0.0, embedded)
        pair = torch.cat([model.hidden_layernorm(hidden), model.token_layernorm(embedded)], dim=-1)
        residual = model.input_proj(pair)
        layer = model.mtp_block
        heads = layer.self_attn.project(layer.input_layernorm(residual), self.rotary.at(positions))
        return residual, *heads

    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.final_layernorm(self.model.mtp_block.finish(residual, attended))
        return hidden, self.target_logits(hidden)
