"""The DFlash draft in plain torch, by the conventions of SGLang's implementation.

Paper: DFlash, arXiv:2602.06036.  A block of ``D`` tokens is drafted in one pass:

* The context is the target's features of every position that it has run, through ``fc`` and
  ``hidden_norm``.  Every draft layer makes keys and values of it with its own projections, at the
  positions of the tokens; no query is made of it, and it passes through no layer.
* The block is the newest token, which the target has not run yet, and ``D - 1`` masks, in the
  target's embedding.  Its rows see the whole context and each other, in both directions.
* Row ``k`` of the block predicts the token ``k`` positions after the newest one; the target's head
  reads it.  Embedding and head are the target's and are never trained.

``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.training.blocks import ModelShape, RmsNorm, RotaryTable, initialise
from engine_shim.training.qwen3 import DecoderLayer


@dataclass(frozen=True)
class DFlashShape:
    """A draft's sizes: the layers of ``decoder`` over the target layers ``feature_layers``.

    ``block``: tokens of a block, the newest included; ``mask_token``: the id that stands for those
    to come.
    """

    decoder: ModelShape
    feature_layers: tuple[int, ...]
    block: int
    mask_token: int

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(f"a block of {self.block} drafts nothing")
        if not 0 <= self.mask_token < self.decoder.vocabulary:
            raise ValueError(f"mask token {self.mask_token} is outside the vocabulary")
        if list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ValueError(f"feature layers {self.feature_layers} are not ascending")


class DFlashStudent(nn.Module):
    """A trainable draft; ``embedding`` [vocabulary, hidden] is the target's, and its head."""

    embedding: Tensor

    def __init__(self, shape: DFlashShape, embedding: Tensor) -> None:
        super().__init__()
        hidden, epsilon = shape.decoder.hidden, shape.decoder.norm_epsilon
        self.shape = shape
        self.fc = nn.Linear(len(shape.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RmsNorm(hidden, epsilon)
        self.layers = nn.ModuleList(
            DecoderLayer(shape.decoder) for _ in range(shape.decoder.layers)
        )
        self.norm = RmsNorm(hidden, epsilon)
        self.rotary = RotaryTable(shape.decoder)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        initialise(self)

    def blocks(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Logits of the blocks that begin at ``anchors``, as drafting would compute each alone.

        Args:
            features: target features of rows 0..L-1, [batch, L, feature layers * hidden].
            tokens: token ids [batch, >= L]; of a block only the anchor's own is read.
            anchors: int64 [A], positions of the newest tokens, 1..L.

        Returns:
            [batch, A, D - 1, vocabulary]; row ``k - 1`` of anchor ``a`` predicts token ``a + k``.
        """
        batch, length = features.shape[:2]
        count, block = len(anchors), self.shape.block
        offsets = torch.arange(block, device=anchors.device)
        ids = torch.full((batch, count, block), self.shape.mask_token, device=tokens.device)
        ids[:, :, 0] = tokens[:, anchors]
        residual = functional.embedding(ids, self.embedding).flatten(1, 2)
        positions = (anchors[:, None] + offsets).flatten()
        rotation = self.rotary.at(positions)
        context_rotation = self.rotary.at(torch.arange(length, device=anchors.device))

        owner = torch.arange(count, device=anchors.device).repeat_interleave(block)
        sees_context = torch.arange(length, device=anchors.device) < anchors[owner, None]
        seen = torch.cat([sees_context, owner[:, None] == owner], dim=-1)

        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            _, context_keys, context_values = layer.self_attn.project(context, context_rotation)
            query, keys, values = layer.self_attn.project(layer.input_layernorm(residual), rotation)
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                torch.cat([context_keys, keys], dim=1).transpose(1, 2),
                torch.cat([context_values, values], dim=1).transpose(1, 2),
                attn_mask=seen,
            )
            residual = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        drafted = self.norm(residual).unflatten(1, (count, block))[:, :, 1:]
        return functional.linear(drafted, self.embedding)

    @torch.no_grad()
    def greedy_block(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The draft a server would propose after ``tokens`` [batch, L + 1]: ids [batch, D - 1].

        ``features`` [batch, L, ...] are the target's for all but the newest token.
        """
        anchor = torch.tensor([features.shape[1]], device=tokens.device)
        return self.blocks(features, tokens, anchor)[:, 0].argmax(dim=-1)


def position_weights(block: int) -> Tensor:
    """[D - 1] how much each drafted position counts: exp(-(k - 1) / g), g = D / 2 (DFlash, 3.3)."""
    weights = torch.exp(-torch.arange(block - 1) / (block / 2))
    return weights / weights.sum()
