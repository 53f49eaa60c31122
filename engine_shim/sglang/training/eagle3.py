"""The EAGLE3 draft in plain torch, by the conventions of SGLang's implementation.

Paper: EAGLE-3, arXiv:2503.01840.  What SGLang fixes beyond the paper, and a student trained
elsewhere must follow:

* The row at position ``p`` takes the target's features at ``p`` and the embedding of the token at
  ``p + 1``, is rotated as position ``p``, and predicts the token at ``p + 2``.
* Features pass ``fc``, after one norm over all of them (``norm_before_fc``) and one over each of
  them (``fc_norm``) where the config asks for it.  ``input_layernorm`` acts on the embedding,
  ``hidden_norm`` on the hidden state; queries, keys and values read ``[embedding, hidden]``.  The
  residual is the hidden state before ``hidden_norm``.
* The hidden state handed to the next draft step is the residual stream *before* the final norm,
  unless the config asks for ``norm_output``; ``lm_head`` always sees that norm.  ``fc`` is not
  applied to it again.
* The embedding is the target's and is never trained.  ``lm_head`` belongs to the draft, with one
  row for each token of the draft vocabulary; its row ``i`` stands for the target's token
  ``i + d2t[i]``.  A draft without a head of its own uses the target's, which is never trained.

``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

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
from engine_shim.sglang.training.chain import ChainStudent

# Target layers that SGLang and SpecForge choose where a config names none.
_DEFAULT_FEATURES: Final = 3


@dataclass(frozen=True)
class Eagle3Shape:
    """A draft's sizes: one layer of ``decoder``, fed by the target layers ``feature_layers``.

    feature_layers: none where the config leaves them to the engine, which then reads three.
    draft_vocabulary: tokens that it can draft, None for all of the target's.  own_head: whether it
    has a head of its own.  norm_before_fc, fc_norm, norm_output: as in the config.
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
            # SGLang tells features from recurrent hidden states by their width, so a single layer
            # would skip ``fc``.
            raise ValueError(
                f"feature layers {self.feature_layers} must be two or more, ascending and distinct"
            )
        if not 0 < self.drafts <= self.decoder.vocabulary:
            raise ValueError(
                f"a draft vocabulary of {self.drafts} tokens is no part of the target's "
                f"{self.decoder.vocabulary}"
            )
        if not self.own_head and self.draft_vocabulary is not None:
            raise ValueError("a draft vocabulary needs a head of its own, and this draft has none")

    @property
    def drafts(self) -> int:
        """The number of tokens that it can draft."""
        if self.draft_vocabulary is None:
            return self.decoder.vocabulary
        return self.draft_vocabulary

    @property
    def features(self) -> int:
        """The number of target layers whose hidden states it reads."""
        return len(self.feature_layers) or _DEFAULT_FEATURES


class DraftLayer(PreNormLayer):
    """The decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.hidden_norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class DraftDecoder(nn.Module):
    """The part that a live draft calls ``model``: feature projection, layer, norm; no embedding."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, epsilon = shape.decoder.hidden, shape.decoder.norm_epsilon
        width = shape.features * hidden
        self.input_norm = RmsNorm(width, epsilon) if shape.norm_before_fc else None
        norms = [RmsNorm(hidden, epsilon) for _ in range(shape.features if shape.fc_norm else 0)]
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
    """A trainable draft; the other arguments are those of `Borrowed`, and stay as they are.

    Raises ValueError where ``tokens`` are not the draft vocabulary that the shape speaks of.
    """

    def __init__(
        self,
        shape: Eagle3Shape,
        embedding: Tensor,
        head: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        count = shape.decoder.vocabulary if tokens is None else len(tokens)
        if count != shape.drafts:
            raise ValueError(f"{count} tokens are named for a draft vocabulary of {shape.drafts}")
        super().__init__(embedding, head, tokens)
        self.shape = shape
        self.model = DraftDecoder(shape)
        self.lm_head = (
            nn.Linear(shape.decoder.hidden, shape.drafts, bias=False) if shape.own_head else None
        )
        self.rotary = Rotary(shape.decoder)
        initialise(self)

    def start_from(self, head: Tensor, final_norm: Tensor) -> None:
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

    def _enter(self, features: Tensor) -> Tensor:
        return self.model.project(features)

    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self._layer
        embedded = layer.input_layernorm(functional.embedding(consumed, self.embedding))
        pair = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        return hidden, *layer.self_attn.project(pair, self.rotary.at(positions))

    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._layer.finish(residual, attended)
        normed = self.model.norm(residual)
        logits = self.target_logits(normed) if self.lm_head is None else self.lm_head(normed)
        return (normed if self.shape.norm_output else residual), logits
