"""The DFlash drafter in plain torch, by the conventions of SGLang's implementation.

Paper: DFlash, arXiv:2602.06036.  A block of ``D`` tokens is drafted in one pass:

* The context is the target's features of every position that it has run, after ``fc`` and
  ``hidden_norm``.  Every draft layer projects them to keys and values at the positions of the
  tokens.  The context has no queries and does not pass through the layers.
* The block is the newest token, which the target has not run yet, and ``D - 1`` mask tokens, in
  the target's embedding.  Its rows attend to the whole context and, in both directions, to each
  other.
* Row ``k`` of the block predicts the token ``k`` positions after the newest one; the target's head
  reads it.  Embedding and head are the target's and are never trained.

Drafting from row ``t`` is a block whose newest token is the one at ``t + 1``.

``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.sglang.training.blocks import (
    BorrowingStudent,
    DecoderLayer,
    DecoderShape,
    RmsNorm,
    Rotary,
    initialise,
)


@dataclass(frozen=True)
class DFlashShape:
    """A drafter's sizes: the layers of ``decoder`` over the target layers ``feature_layers``.

    ``block``: tokens of a block, the newest included; ``mask_token``: the id that stands for the
    unknown tokens.
    """

    decoder: DecoderShape
    feature_layers: tuple[int, ...]
    block: int
    mask_token: int

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(f"a block of {self.block} tokens drafts nothing: it needs two or more")
        if not 0 <= self.mask_token < self.decoder.vocabulary:
            raise ValueError(
                f"mask token {self.mask_token} is outside the vocabulary of "
                f"{self.decoder.vocabulary} tokens"
            )
        if list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ValueError(f"feature layers {self.feature_layers} are not ascending")


class DFlashStudent(BorrowingStudent):
    """A trainable drafter; ``embedding`` [vocabulary, hidden] is the target's.

    ``head``: the target's, if that is not the embedding.
    """

    def __init__(self, shape: DFlashShape, embedding: Tensor, head: Tensor | None = None) -> None:
        super().__init__(embedding, head)
        hidden, epsilon = shape.decoder.hidden, shape.decoder.norm_epsilon
        self.shape = shape
        self.fc = nn.Linear(len(shape.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RmsNorm(hidden, epsilon)
        self.layers = nn.ModuleList(
            DecoderLayer(shape.decoder) for _ in range(shape.decoder.layers)
        )
        self.norm = RmsNorm(hidden, epsilon)
        self.rotary = Rotary(shape.decoder)
        initialise(self)

    @property
    def position_discount(self) -> float:
        """Returns the weight of a draft position relative to the previous one.

        It is the factor of `position_weights`.
        """
        return math.exp(-1 / loss_decay(self.shape.block))

    @property
    def max_drafts(self) -> int:
        """Returns the number of tokens of a block that are drafted."""
        return self.shape.block - 1

    def unroll(
        self,
        features: Tensor,
        tokens: Tensor,
        steps: int,
        *,
        first_anchor: int = 0,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> list[Tensor]:
        """Computes the first ``steps`` drafts of a block from every anchor.

        Arguments and result are those of `Eagle3Student.unroll`.  Raises ValueError for more steps
        than a block has.
        """
        if steps > self.max_drafts:
            raise ValueError(
                f"a block of {self.shape.block} has {self.max_drafts} drafts, not {steps}"
            )
        newest = torch.arange(first_anchor + 1, features.shape[1] + 1, device=features.device)
        drafted = self.block_logits(features, tokens, newest, positions=positions, valid=valid)
        return list(drafted[:, :, :steps].unbind(dim=2))

    def block_logits(
        self,
        features: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        *,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Computes the logits of the blocks that start at ``anchors``, as in drafting.

        Args:
            features: target features of rows 0..L-1, [batch, L, feature layers * hidden].
            tokens: token ids [batch, >= L]; of a block only the anchor's token is read.
            anchors: int64 [A], rows of the newest tokens, 1..L.
            positions: of the rows, [L] or [batch, L]; 0..L-1 if None.
            valid: which rows exist, bool [batch, L]; all of them if None.

        Returns:
            [batch, A, D - 1, vocabulary]; row ``k - 1`` of anchor ``a`` predicts token ``a + k``.
        """
        batch, length = features.shape[:2]
        count, block = len(anchors), self.shape.block
        offsets = torch.arange(block, device=anchors.device)
        ids = torch.full((batch, count, block), self.shape.mask_token, device=tokens.device)
        ids[:, :, 0] = tokens[:, anchors]
        residual = functional.embedding(ids, self.embedding).flatten(1, 2)
        rows = torch.arange(length, device=anchors.device)
        positions = rows if positions is None else positions
        block_positions = positions[..., anchors - 1, None] + 1 + offsets
        rotation = self.rotary.compute_rotation(block_positions.flatten(-2))
        context_rotation = self.rotary.compute_rotation(positions)

        owner = torch.arange(count, device=anchors.device).repeat_interleave(block)
        sees_context = (rows < anchors[owner, None])[None, None]
        if valid is not None:
            sees_context = sees_context & valid[:, None, None, :]
        same_block = (owner[:, None] == owner).expand(*sees_context.shape[:2], -1, -1)
        visible = torch.cat([sees_context, same_block], dim=-1)

        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            _, context_keys, context_values = layer.self_attn.project(context, context_rotation)
            query, keys, values = layer.self_attn.project(layer.input_layernorm(residual), rotation)
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                torch.cat([context_keys, keys], dim=1).transpose(1, 2),
                torch.cat([context_values, values], dim=1).transpose(1, 2),
                attn_mask=visible,
            )
            residual = layer.finish(residual, attended.transpose(1, 2).flatten(2))
        return self.target_logits(self.norm(residual).unflatten(1, (count, block))[:, :, 1:])

    @torch.no_grad()
    def greedy_block(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Returns the draft that a server would propose after ``tokens``: ids [batch, D - 1].

        ``tokens`` [batch, L + 1] are all tokens so far; the target has not run the newest one.

        ``features`` [batch, L, ...] are the target's for all but the newest token.
        """
        anchor = torch.tensor([features.shape[1]], device=tokens.device)
        return self.drafted_tokens(self.block_logits(features, tokens, anchor)[:, 0])


def loss_decay(block: int) -> float:
    """Returns the number of draft positions over which the weight of a position falls to 1/e.

    This is gamma in Eq. 4 of the DFlash paper (arXiv:2602.06036, appendix A.1), which gives it for
    blocks of 8 (4), 10 (5) and 16 (7).  Other sizes are interpolated linearly: half the block up to
    10, and a third of a position for each further token.
    """
    return min(block / 2, 5 + (block - 10) / 3)


def position_weights(block: int) -> Tensor:
    """Weighs each drafted position, [D - 1], by exp(-(k - 1) / `loss_decay`) (DFlash, Eq. 4)."""
    weights = torch.exp(-torch.arange(block - 1) / loss_decay(block))
    return weights / weights.sum()
