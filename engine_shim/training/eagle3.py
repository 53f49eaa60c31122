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

from engine_shim.training.blocks import DecoderShape, PreNormLayer, RmsNorm, RotaryTable, initialise
from engine_shim.training.chain import ChainStudent


@dataclass(frozen=True)
class Eagle3Shape:
    """A draft's sizes: one layer of ``decoder``, fed by the target layers ``feature_layers``."""

    decoder: DecoderShape
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


class DraftLayer(PreNormLayer):
    """The decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.hidden_norm = RmsNorm(shape.hidden, shape.norm_epsilon)


class DraftDecoder(nn.Module):
    """The part that a live draft calls ``model``: feature projection, layer, norm; no embedding."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden = shape.decoder.hidden
        self.fc = nn.Linear(len(shape.feature_layers) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(shape.decoder)])
        self.norm = RmsNorm(hidden, shape.decoder.norm_epsilon)


class Eagle3Student(ChainStudent):
    """A trainable draft; ``embedding`` [vocabulary, hidden] is the target's and stays as is."""

    def __init__(self, shape: Eagle3Shape, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.shape = shape
        self.model = DraftDecoder(shape)
        self.lm_head = nn.Linear(shape.decoder.hidden, shape.decoder.vocabulary, bias=False)
        self.rotary = RotaryTable(shape.decoder)
        initialise(self)

    def start_from(self, head: Tensor, final_norm: Tensor) -> None:
        """Starts from the target's head, its final norm, and its last feature through ``fc``."""
        hidden = self.shape.decoder.hidden
        with torch.no_grad():
            self.lm_head.weight.copy_(head)
            self.model.norm.weight.copy_(final_norm)
            self.model.fc.weight[:, -hidden:] += torch.eye(hidden)

    @property
    def _layer(self) -> DraftLayer:
        layer = self.model.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def _enter(self, features: Tensor) -> Tensor:
        entered: Tensor = self.model.fc(features)
        return entered

    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self._layer
        embedded = layer.input_layernorm(functional.embedding(consumed, self.embedding))
        pair = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        return hidden, *layer.self_attn.project(pair, self.rotary.at(positions))

    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._layer.finish(residual, attended)
        return residual, self.lm_head(self.model.norm(residual))
