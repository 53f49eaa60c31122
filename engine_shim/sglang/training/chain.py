"""Drafters that draft token by token, in plain torch: one layer, run again on its own output.

The row at position ``p`` takes the target's features at ``p`` and the embedding of the token at
``p + 1``, is rotated as position ``p``, and predicts the token at ``p + 2``.  ``state_dict`` keys
are the live model's parameter names.

EAGLE-3, arXiv:2503.01840.  Conventions that SGLang adds to the paper, and that every student must
follow:

* Features pass ``fc``, after one norm over all of them (``norm_before_fc``) and one over each of
  them (``fc_norm``) where the config asks for it.  ``input_layernorm`` acts on the embedding,
  ``hidden_norm`` on the hidden state; queries, keys and values read ``[embedding, hidden]``.  The
  residual is the hidden state before ``hidden_norm``.
* The hidden state for the next draft step is the residual stream *before* the final norm, unless
  the config asks for ``norm_output``; ``lm_head`` always reads the normed state.  ``fc`` is not
  applied again.
* The embedding is the target's and is never trained.  ``lm_head`` belongs to the draft, with one
  row for each token of the draft vocabulary; its row ``i`` stands for the target's token
  ``i + d2t[i]``.  A draft without a head of its own uses the target's, which is never trained.

The multi-token predictor of MiMo checkpoints (arXiv:2505.07608), by SGLang's conventions: one Qwen2
layer over ``input_proj`` of the normed hidden state and the normed embedding of the next token; at
a request's first position that embedding is zero.  The hidden state is the target's last one, after
its norm, and then the predictor's own, after ``final_layernorm``.  Embedding and head are the
target's and are never trained.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.sglang.training.blocks import (
    BorrowingStudent,
    DecoderShape,
    PreNormLayer,
    RmsNorm,
    Rotary,
    initialise,
)

_MASKED_SCORE = -1e9
_POSITION_DISCOUNT = 0.8

# Number of target layers that SGLang and SpecForge choose if a config names none.
_DEFAULT_FEATURES: Final = 3


class ChainStudent(BorrowingStudent):
    """A trainable drafter whose drafts form a chain; subclasses define the layer."""

    @property
    def position_discount(self) -> float:
        """Returns the weight of a draft position relative to the previous one.

        The authors of EAGLE-3 (arXiv:2503.01840) and SpecForge train with 0.8 ** k.
        """
        return _POSITION_DISCOUNT

    @property
    def max_drafts(self) -> int | None:
        """Returns None because a chain may have any length."""
        return None

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
        """Computes the logits of ``steps`` draft steps from every anchor, as in drafting.

        This is training-time test (EAGLE-3, section 3.2): at step ``j`` the anchor at row ``t``
        consumes token ``t + 1 + j`` and sees only the true features up to row ``t`` and its own
        earlier steps.

        Args:
            features: target features of rows 0..L-1, [batch, L, width].
            tokens: at least L + steps tokens starting at row 0, [batch, >= L + steps].
            steps: draft length.
            first_anchor: first row to draft from; rows before it are context only.
            positions: of the rows, [L] or [batch, L]; 0..L-1 if None.
            valid: which rows exist, bool [batch, L]; all of them if None.

        Returns:
            One tensor for each step, [batch, L - first_anchor, draft vocabulary]; step ``j`` of row
            ``t`` predicts token ``t + 2 + j``.
        """
        length = features.shape[1]
        rows = torch.arange(length, device=features.device)
        positions = rows if positions is None else positions
        visible = rows <= rows[first_anchor:, None]  # [anchors, L]
        visible = visible[None, None] if valid is None else visible & valid[:, None, None, :]

        hidden = self._initial_hidden(features)
        residual, query, context_keys, context_values = self._project(
            hidden, tokens[:, 1 : 1 + length], positions
        )
        residual, query = residual[:, first_anchor:], query[:, first_anchor:]
        anchor_positions = positions[..., first_anchor:]

        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            if step:
                consumed = tokens[:, first_anchor + 1 + step : length + 1 + step]
                residual, query, key, value = self._project(
                    hidden, consumed, anchor_positions + step
                )
                own_keys.append(key)
                own_values.append(value)
            attended = _attend(query, context_keys, context_values, visible, own_keys, own_values)
            hidden, logits = self._finish(residual, attended)
            outputs.append(logits)
        return outputs

    @torch.no_grad()
    def greedy_chain(self, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
        """Returns the draft that a server would propose after ``tokens``: ids [batch, steps].

        ``tokens`` [batch, L + 1] are all tokens so far; the target has not run the newest one.
        ``features`` [batch, L, ...] are the target's for all but the newest.  A comparison
        with the proposals of a live drafter tests all conventions above.
        """
        for _ in range(steps):
            steps_ahead = tokens.shape[1] - features.shape[1]
            logits = self.unroll(features, tokens, steps_ahead, first_anchor=features.shape[1] - 1)[
                -1
            ]
            tokens = torch.cat([tokens, self.drafted_tokens(logits)], dim=1)
        return tokens[:, -steps:]

    @abstractmethod
    def _initial_hidden(self, features: Tensor) -> Tensor:
        """Maps features [batch, L, width] to hidden states [batch, L, hidden]."""

    @abstractmethod
    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Makes the residual stream [batch, L, hidden] and its q, k, v [batch, L, heads, head_dim].

        hidden: states of the step before; consumed: token ids [batch, L].
        """

    @abstractmethod
    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden state that the next step starts from, and logits."""


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Attends from each anchor to the shared context and to its own chain.

    Returns [batch, anchors, query width].  The chain has only a few keys, which differ per anchor,
    so they are scored elementwise and not in the shared matrix.
    """
    scale = query.shape[-1] ** -0.5
    shared = torch.einsum("bqhd,bkhd->bhqk", query, keys).masked_fill(~visible, _MASKED_SCORE)
    own_scores = [(query * key).sum(dim=-1).transpose(1, 2).unsqueeze(-1) for key in own_keys]
    weights = (torch.cat([shared, *own_scores], dim=-1) * scale).softmax(dim=-1)
    context = keys.shape[1]
    output = torch.einsum("bhqk,bkhd->bqhd", weights[..., :context], values)
    for index, value in enumerate(own_values):
        output = output + weights[..., context + index].transpose(1, 2).unsqueeze(-1) * value
    return output.flatten(2)


@dataclass(frozen=True)
class MtpShape:
    """A predictor's sizes: one layer of ``decoder``."""

    decoder: DecoderShape

    def __post_init__(self) -> None:
        if self.decoder.layers != 1:
            raise ValueError(f"a predictor has one layer, not {self.decoder.layers}")


class Predictor(nn.Module):
    """The part that a live predictor calls ``model``, without the embedding."""

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

    def _initial_hidden(self, features: Tensor) -> Tensor:
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
        heads = layer.self_attn.project(
            layer.input_layernorm(residual), self.rotary.compute_rotation(positions)
        )
        return residual, *heads

    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.final_layernorm(self.model.mtp_block.finish(residual, attended))
        return hidden, self.target_logits(hidden)


@dataclass(frozen=True)
class Eagle3Shape:
    """A drafter's sizes: one layer of ``decoder``, fed by the target layers ``feature_layers``.

    feature_layers: empty if the config leaves them to the engine, which then reads three.
    draft_vocabulary: number of tokens that it can draft, None for all of the target's.  own_head:
    whether it has its own head.  norm_before_fc, fc_norm, norm_output: as in the config.
    """

    decoder: DecoderShape
    feature_layers: tuple[int, ...]
    draft_vocabulary: int | None = None
    own_head: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.decoder.layers != 1:
            raise ValueError(f"an EAGLE3 draft has one layer, not {self.decoder.layers}")
        if len(self.feature_layers) == 1 or list(self.feature_layers) != sorted(
            set(self.feature_layers)
        ):
            # SGLang distinguishes features from hidden states of draft steps by their width, so
            # features of a single layer would skip ``fc``.
            raise ValueError(
                f"feature layers {self.feature_layers} must be two or more, ascending and distinct"
            )
        if not 0 < self.draft_vocabulary_size <= self.decoder.vocabulary:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocabulary_size} tokens must be in [1, "
                f"{self.decoder.vocabulary}], the target's vocabulary"
            )
        if not self.own_head and self.draft_vocabulary is not None:
            raise ValueError("a draft vocabulary needs its own head, and this drafter has none")

    @property
    def draft_vocabulary_size(self) -> int:
        """Returns the number of tokens that it can draft."""
        if self.draft_vocabulary is None:
            return self.decoder.vocabulary
        return self.draft_vocabulary

    @property
    def feature_count(self) -> int:
        """Returns the number of target layers whose hidden states it reads."""
        return len(self.feature_layers) or _DEFAULT_FEATURES


class DraftLayer(PreNormLayer):
    """The decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.hidden_norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class DraftDecoder(nn.Module):
    """The part that a live drafter calls ``model``: feature projection, layer and norm."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, epsilon = shape.decoder.hidden, shape.decoder.norm_epsilon
        width = shape.feature_count * hidden
        self.input_norm = RmsNorm(width, epsilon) if shape.norm_before_fc else None
        norms = [
            RmsNorm(hidden, epsilon) for _ in range(shape.feature_count if shape.fc_norm else 0)
        ]
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(shape.decoder)])
        self.norm = RmsNorm(hidden, epsilon)

    def project(self, features: Tensor) -> Tensor:
        """Maps features [..., features * hidden] to hidden states [..., hidden]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, chunks, strict=True)
            features = torch.cat([norm(chunk) for norm, chunk in pairs], dim=-1)
        projected: Tensor = self.fc(features)
        return projected


class Eagle3Student(ChainStudent):
    """A trainable drafter; the other arguments are those of `Borrowed`, which are never trained.

    Raises ValueError if the number of ``tokens`` is not the draft vocabulary of the shape.
    """

    def __init__(
        self,
        shape: Eagle3Shape,
        embedding: Tensor,
        head: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        count = shape.decoder.vocabulary if tokens is None else len(tokens)
        if count != shape.draft_vocabulary_size:
            raise ValueError(
                f"{count} tokens are given for a draft vocabulary of {shape.draft_vocabulary_size}"
            )
        super().__init__(embedding, head, tokens)
        self.shape = shape
        self.model = DraftDecoder(shape)
        self.lm_head = (
            nn.Linear(shape.decoder.hidden, shape.draft_vocabulary_size, bias=False)
            if shape.own_head
            else None
        )
        self.rotary = Rotary(shape.decoder)
        initialise(self)

    def initialise_from_target(self, head: Tensor, final_norm: Tensor) -> None:
        """Starts from the target's head, its final norm, and its last feature through ``fc``."""
        hidden = self.shape.decoder.hidden
        with torch.no_grad():
            if self.lm_head is not None:
                self.lm_head.weight.copy_(head if self.tokens is None else head[self.tokens])
            self.model.norm.weight.copy_(final_norm)
            self.model.fc.weight[:, -hidden:] += torch.eye(hidden)

    @property
    def _layer(self) -> DraftLayer:
        layer = self.model.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def _initial_hidden(self, features: Tensor) -> Tensor:
        return self.model.project(features)

    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self._layer
        embedded = layer.input_layernorm(functional.embedding(consumed, self.embedding))
        pair = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        return hidden, *layer.self_attn.project(pair, self.rotary.compute_rotation(positions))

    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._layer.finish(residual, attended)
        normed = self.model.norm(residual)
        logits = self.target_logits(normed) if self.lm_head is None else self.lm_head(normed)
        return (normed if self.shape.norm_output else residual), logits
