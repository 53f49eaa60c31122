"""Defines SD2's drafter: small, pretrained, and steered by the verifier's hidden states.

Paper: Steering Pretrained Drafters during Speculative Decoding (SD2).  The drafter is a language
model of its own, of any width.  From the verifier's low, middle and high hidden states at the last
verified position comes a steering vector

    g = W_hml [h; m; l]                                         (W_hml = [I I I] at first)

which is as wide as they are, and every MLP of the drafter becomes, with W_s = 0 at first,

    W_d ((W_u a + W_s g) * silu(W_g a))                         (Eq. 2)

Here g is normed before W_s: a residual stream holds some channels that are much larger than the
rest.  Row p takes the token at p + 1 and the hidden states at p, as SGLang hands both to a drafter,
and predicts the token at p + 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.language_model import FAMILIES, QWEN3, Family, LanguageModel

# As checkpoints name the steered drafters of each family.
STEERED: Final = {f"Steered{family.architecture}": family for family in FAMILIES}


@dataclass(frozen=True)
class Sd2Shape:
    """The sizes of an SD2 drafter.

    decoder: of the drafter.  target_hidden: width of the verifier's hidden states, and so of the
    steering vector; it may differ from the drafter's.  feature_layers: those of the verifier that
    are read.  family: of the drafter.  tied: whether its embedding is its head.  Raises ValueError.
    """

    decoder: DecoderShape
    target_hidden: int
    feature_layers: tuple[int, ...]
    family: Family = QWEN3
    tied: bool = True

    def __post_init__(self) -> None:
        if self.target_hidden < 1:
            raise ValueError("a steering vector has a width")
        if len(self.feature_layers) < 2:
            raise ValueError("a steering vector is made of two hidden states or more")


class Sd2Draft(nn.Module):
    """An SD2 drafter with its steering; `decoder` is a language model of its own."""

    def __init__(self, shape: Sd2Shape) -> None:
        super().__init__()
        self.shape = shape
        width, mlp = shape.target_hidden, shape.decoder.mlp
        self.decoder = LanguageModel(shape.decoder, shape.family, tied=shape.tied)
        self.mix = nn.Linear(len(shape.feature_layers) * width, width, bias=False)
        self.steer = nn.ModuleList(
            nn.Linear(width, mlp, bias=False) for _ in range(shape.decoder.layers)
        )
        with torch.no_grad():
            self.mix.weight.copy_(torch.cat([torch.eye(width)] * len(shape.feature_layers), dim=1))
            for part in self.steer:
                assert isinstance(part, nn.Linear)
                part.weight.zero_()

    def steering(self, features: Tensor) -> Tensor:
        """Computes g, normed: [..., feature layers * target's width] to [..., target's width]."""
        return functional.layer_norm(self.mix(features), (self.shape.target_hidden,))

    def forward(self, tokens: Tensor, steering: Tensor | None = None) -> Tensor:
        """Computes the logits of each next token.

        tokens: [batch, L].  steering: g of each row, [batch, L, target's width]; None: plain.
        Returns [batch, L, vocabulary].
        """
        model = self.decoder.model
        rotation = self.decoder.rotary.at(torch.arange(tokens.shape[1], device=tokens.device))
        residual = model.embed_tokens(tokens)
        for layer, steer in zip(model.layers, self.steer, strict=True):
            bias = None if steering is None else steer(steering)
            residual = layer(residual, rotation, bias)
        return functional.linear(model.norm(residual), self.decoder.head)


def offsets(rows: int, batch: int, drafts: int, generator: torch.Generator) -> Tensor:
    """Draws for each row the row whose hidden states steer it, [batch, rows].

    It lies 0 to drafts - 1 rows back, uniformly (the paper's delta): as far as the last verified
    position is behind each of so many drafts.
    """
    back = torch.randint(drafts, (batch, rows), generator=generator)
    return (torch.arange(rows) - back).clamp_min(0)


def blocked_offsets(rows: int, batch: int, drafts: int, generator: torch.Generator) -> Tensor:
    """Draws `offsets` as serving has them: one row steers itself and all of its block.

    Blocks have `drafts` rows, and begin at a row of each text's own (appendix A.4).
    """
    first = torch.randint(drafts, (batch, 1), generator=generator)
    row = torch.arange(rows)
    return (row - (row - first) % drafts).clamp_min(0)


def divergence(
    draft: Sd2Draft, tokens: Tensor, logits: Tensor, features: Tensor | None, back: Tensor
) -> Tensor:
    """Computes the mean KL(verifier || draft) of each row's next token, in nats.

    tokens: [batch, L].  logits: the verifier's, [batch, L, vocabulary].  features: its hidden
    states, [batch, L, feature layers * its width], None to train without steering.  back: see
    `offsets`, [batch, L - 1].
    """
    steering = None
    if features is not None:
        rows = torch.arange(tokens.shape[0])[:, None]
        steering = draft.steering(features[rows, back])
    mine = functional.log_softmax(draft(tokens[:, 1:], steering), dim=-1)
    theirs = functional.log_softmax(logits[:, 1:], dim=-1)
    return functional.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1).mean()


@torch.no_grad()
def greedy_chain(
    draft: Sd2Draft, features: Tensor, tokens: Tensor, drafts: int, *, steered: bool = True
) -> Tensor:
    """Drafts what a server would propose after `tokens`: ids [batch, drafts].

    tokens: [batch, L + 1], the newest not yet run by the verifier.  features: of all but that one.
    """
    steering = draft.steering(features) if steered else None
    for _ in range(drafts):
        grown = tokens.shape[1] - 1 - features.shape[1]
        g = None
        if steering is not None:
            g = torch.cat([steering, steering[:, -1:].expand(-1, grown, -1)], dim=1)
        newest = draft(tokens[:, 1:], g)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, newest], dim=1)
    return tokens[:, -drafts:]
