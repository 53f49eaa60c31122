"""The EAGLE3 draft in plain torch, by the conventions of SGLang's implementation.

Paper: EAGLE-3, arXiv:2503.01840.  What SGLang fixes beyond the paper, and a student trained
elsewhere must follow:

* The row at position ``p`` takes the target's features at ``p`` and the embedding of the token at
  ``p + 1``, is rotated as position ``p``, and predicts the token at ``p + 2``.
* Features pass ``fc`` without a norm before it.  ``input_layernorm`` acts on the embedding,
  ``hidden_norm`` on the hidden state; queries, keys and values read ``[embedding, hidden]``.  The
  residual is the hidden state before ``hidden_norm``.
* The hidden state handed to the next draft step is the residual stream *before* the final norm;
  only ``lm_head`` sees that norm.  ``fc`` is not applied to it again.
* The embedding is the target's and is never trained; ``lm_head`` belongs to the draft.

``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.training.blocks import (
    AttentionProjections,
    GatedMlp,
    ModelShape,
    RmsNorm,
    RotaryTable,
    initialise,
)

_MASKED_SCORE = -1e9


@dataclass(frozen=True)
class Eagle3Shape:
    """A draft's sizes: one layer of ``decoder``, fed by the target layers ``feature_layers``."""

    decoder: ModelShape
    feature_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.decoder.layers != 1:
            raise ValueError(f"an EAGLE3 draft has one layer, not {self.decoder.layers}")
        if len(self.feature_layers) < 2 or list(self.feature_layers) != sorted(
            set(self.feature_layers)
        ):
            # SGLang tells features from recurrent hidden states by their width, so a single layer
            # would skip ``fc``.
            raise ValueError(
                f"feature layers {self.feature_layers} must be two or more, ascending and distinct"
            )


class DraftLayer(nn.Module):
    """The decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.hidden_norm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = AttentionProjections(shape, 2 * shape.hidden, norm_heads=False)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = GatedMlp(shape)


class DraftDecoder(nn.Module):
    """What a live draft calls ``model``: feature projection, layer, norm; no embedding."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden = shape.decoder.hidden
        self.fc = nn.Linear(len(shape.feature_layers) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(shape.decoder)])
        self.norm = RmsNorm(hidden, shape.decoder.norm_epsilon)


class Eagle3Student(nn.Module):
    """A trainable draft; ``embedding`` [vocabulary, hidden] is the target's and stays as is."""

    embedding: Tensor

    def __init__(self, shape: Eagle3Shape, embedding: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.model = DraftDecoder(shape)
        self.lm_head = nn.Linear(shape.decoder.hidden, shape.decoder.vocabulary, bias=False)
        self.rotary = RotaryTable(shape.decoder)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        initialise(self)

    @property
    def most_drafts(self) -> int | None:
        """None: a chain may be of any length."""
        return None

    def start_from(self, head: Tensor, final_norm: Tensor) -> None:
        """Begin where the target ends: its head, its norm, its last feature through ``fc``."""
        hidden = self.shape.decoder.hidden
        with torch.no_grad():
            self.lm_head.weight.copy_(head)
            self.model.norm.weight.copy_(final_norm)
            self.model.fc.weight[:, -hidden:] += torch.eye(hidden)

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
        """Logits of ``steps`` draft steps from every anchor, as drafting would compute them.

        This is training-time test (EAGLE-3, section 3.2): at step ``j`` the anchor at row ``t``
        consumes token ``t + 1 + j`` and sees the true features up to row ``t``, then its own
        earlier steps, and nothing else.

        Args:
            features: target features of rows 0..L-1, [batch, L, feature layers * hidden].
            tokens: at least L + steps tokens starting at row 0, [batch, >= L + steps].
            steps: draft length.
            first_anchor: rows before it are context only.
            positions: of the rows, [L] or [batch, L]; 0..L-1 when absent.
            valid: which rows exist, bool [batch, L]; all of them when absent.

        Returns:
            One tensor a step, [batch, L - first_anchor, vocabulary]; step ``j`` of row ``t``
            predicts token ``t + 2 + j``.
        """
        length = features.shape[1]
        rows = torch.arange(length, device=features.device)
        positions = rows if positions is None else positions
        seen = rows <= rows[first_anchor:, None]  # [anchors, L]
        seen = seen[None, None] if valid is None else seen & valid[:, None, None, :]

        hidden = self.model.fc(features)
        query, context_keys, context_values = self._project(
            hidden, tokens[:, 1 : 1 + length], positions
        )
        hidden, query = hidden[:, first_anchor:], query[:, first_anchor:]
        anchor_positions = positions[..., first_anchor:]

        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            if step:
                consumed = tokens[:, first_anchor + 1 + step : length + 1 + step]
                query, key, value = self._project(hidden, consumed, anchor_positions + step)
                own_keys.append(key)
                own_values.append(value)
            attended = _attend(query, context_keys, context_values, seen, own_keys, own_values)
            hidden, logits = self._finish(hidden, attended)
            outputs.append(logits)
        return outputs

    @torch.no_grad()
    def greedy_chain(self, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
        """The draft a server would propose after ``tokens``: ids [batch, steps].

        ``tokens`` [batch, L + 1] are all tokens so far, the newest not yet run by the target;
        ``features`` [batch, L, ...] are the target's for all but the newest.  Compared with what a
        live draft proposed, this is the test of every convention above.
        """
        for _ in range(steps):
            made = tokens.shape[1] - features.shape[1]
            logits = self.unroll(features, tokens, made, first_anchor=features.shape[1] - 1)[-1]
            tokens = torch.cat([tokens, logits.argmax(dim=-1)], dim=1)
        return tokens[:, -steps:]

    @property
    def _layer(self) -> DraftLayer:
        layer = self.model.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._layer
        embedded = layer.input_layernorm(functional.embedding(consumed, self.embedding))
        pair = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        return layer.self_attn.project(pair, self.rotary.at(positions))

    def _finish(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream before the final norm (the next step's hidden state), and logits."""
        layer = self._layer
        residual = hidden + layer.self_attn.o_proj(attended)
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return residual, self.lm_head(self.model.norm(residual))


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Each anchor over the shared context and its own chain, to [batch, anchors, query width].

    The own chain is a handful of keys that differ per anchor, so it is scored elementwise beside
    the shared matrix.
    """
    scale = query.shape[-1] ** -0.5
    shared = torch.einsum("bqhd,bkhd->bhqk", query, keys).masked_fill(~seen, _MASKED_SCORE)
    own = [(query * key).sum(dim=-1).transpose(1, 2).unsqueeze(-1) for key in own_keys]
    weights = (torch.cat([shared, *own], dim=-1) * scale).softmax(dim=-1)
    context = keys.shape[1]
    output = torch.einsum("bhqk,bkhd->bqhd", weights[..., :context], values)
    for index, value in enumerate(own_values):
        output = output + weights[..., context + index].transpose(1, 2).unsqueeze(-1) * value
    return output.flatten(2)
